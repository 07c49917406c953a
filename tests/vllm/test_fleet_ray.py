"""What `kvxfer bench fleet-ray` reads and how it judges, without Ray; the run itself is `make fleet-ray`."""

from __future__ import annotations

import typer
from typer.testing import CliRunner

from kvxfer_bench.vllm.clients import Answers
from kvxfer_bench.vllm.fleet_ray import LOADED, _objections, fleet_ray

PAGE = """\
ray_vllm_prompt_tokens_by_source_total{Component="core_worker",ReplicaId="5v6b5qjl",engine="0",source="external_kv_transfer"} 0.0
ray_vllm_prompt_tokens_by_source_total{Component="core_worker",ReplicaId="17038bn8",engine="0",source="local_compute"} 12.0
ray_vllm_prompt_tokens_by_source_total{Component="core_worker",ReplicaId="17038bn8",engine="0",source="external_kv_transfer"} 477.0
"""


def test_replicas_are_told_by_the_kv_that_came_to_them() -> None:
    """The lines are those of Ray 2.60 with vLLM 0.32, without most of their labels."""
    assert [(line["replica"], line["tokens"]) for line in LOADED.finditer(PAGE)] == [("17038bn8", "477.0")]


def test_a_run_that_interrupted_nothing_is_no_success() -> None:
    assert _objections(Answers(asked_again=1)) == []
    assert "nothing was interrupted" in _objections(Answers())[0]
    assert _objections(Answers(asked_again=1, wrong=["other tokens"], failed=["no answer"])) == [
        "other tokens",
        "no answer",
    ]


def test_without_ray_it_says_how_to_have_it() -> None:
    app = typer.Typer()
    app.command()(fleet_ray)
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 2 and "Ray" in result.stderr and "fleet-ray" in result.stderr.partition("Ray")[2]
