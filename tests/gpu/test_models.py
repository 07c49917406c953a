"""Models of several kinds, and engines of unlike sizes, on vLLM's servers on GPUs: tokens are those of prefill by itself.

Prefill is on one GPU and decode on another, where there are two. The servers of all models that are tested are started side by side.
``test_vllm.py`` has the plainest of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import require

require("vllm")

import torch  # noqa: E402  (only where vLLM is)

from kvxfer_vllm.demo.metrics import received, total  # noqa: E402
from kvxfer_vllm.demo.model import LAYERS, write_model  # noqa: E402
from kvxfer_vllm.demo.routing import prefill_then_decode  # noqa: E402
from kvxfer_vllm.demo.servers import BLOCK, ended_together  # noqa: E402
from tests.e2e.models import write_mla, write_recurrent, write_window  # noqa: E402
from tests.gpu.servers import TIE, TOKENS, TRITON, Servers  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.e2e, pytest.mark.xdist_group("models"), pytest.mark.timeout(500)]

TEXT = ", ".join(f"{n} times {n + 3} is {n * (n + 3)}" for n in range(1, 60))
PROMPTS = [f"{n}: {TEXT}"[:length] for n, length in enumerate((40, 70, 97, 200, 333, 512, 650, 700))]
TWO = ("--tensor-parallel-size", "2")
TURNS = (*TWO, "--decode-context-parallel-size", "2")
"""For prefill alone: where vLLM 0.33 decodes this model so, its tokens are wrong without any connector."""
BFLOAT16 = ("--dtype", "bfloat16")
ROUNDED = 0.25
"""``TIE`` where all is rounded to bfloat16: two steps of logits between 16 and 32."""


def drafting(model: Path) -> tuple[str, ...]:
    """Return what has a server guess by the model itself, so that guesses are right if the draft model's cache is."""
    return "--speculative-config", json.dumps(
        {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3}
    )


@dataclass(frozen=True)
class Kind:
    """What ``write`` writes, on servers with ``flags``; ``checked`` layers write their cache where the layout check can see it."""

    write: Callable[[Path], None]
    flags: tuple[str, ...] = TRITON
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    drafts: bool = False
    tie: float = TIE
    checked: int = LAYERS
    slow: bool = False

    @property
    def marks(self) -> list[pytest.MarkDecorator]:
        """What its test needs."""
        two = TWO[0] in (*self.prefill, *self.decode)
        return [*[pytest.mark.gpus] * two, *[pytest.mark.slow] * self.slow]


LATENT = ("--attention-backend", "TRITON_MLA", *BFLOAT16)
KINDS = {
    "one group": Kind(write_model, slow=True),
    "two groups": Kind(write_window),
    "recurrent states": Kind(write_recurrent, checked=LAYERS // 2),
    "latent": Kind(write_mla, LATENT, tie=ROUNDED),
    "fp8": Kind(write_model, (*TRITON, *BFLOAT16, "--kv-cache-dtype", "fp8"), tie=ROUNDED),
    "drafts": Kind(write_model, drafts=True, checked=2 * LAYERS),
    "two ranks to one": Kind(write_model, prefill=TWO),
    "one rank to two": Kind(write_model, decode=TWO),
    "latent, two ranks to one": Kind(write_mla, LATENT, prefill=TWO, tie=ROUNDED, slow=True),
    "two groups, one rank to two": Kind(write_window, decode=TWO, slow=True),
    "latent, two ranks in turn to one": Kind(write_mla, LATENT, prefill=TURNS, tie=ROUNDED, slow=True),
    "latent, two ranks in turn to two": Kind(write_mla, LATENT, prefill=TURNS, decode=TWO, tie=ROUNDED, slow=True),
}


@pytest.fixture(scope="module")
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Servers]]:
    gpus = torch.cuda.device_count()
    chosen = [item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")]
    with ended_together() as begun:
        found = {}
        for name, kind in KINDS.items():
            if name not in chosen:
                continue
            folder = tmp_path_factory.mktemp("model")
            kind.write(folder / "model")
            found[name] = servers = Servers(folder, begun, kind.flags, kind.tie, "prefill")
            guesses = drafting(folder / "model") if kind.drafts else ()
            for side, flags, backend in (
                ("prefill", (*kind.prefill, *guesses), "auto"),
                ("decode", (*kind.decode, *guesses), "auto"),
            ):
                on = "0,1" if TWO[0] in flags else str(int(side == "decode") % gpus)
                servers.start(side, backend, flags, {"CUDA_VISIBLE_DEVICES": on, "VLLM_LOGGING_LEVEL": "INFO"})
        yield found


@pytest.mark.parametrize("name", [pytest.param(name, marks=kind.marks) for name, kind in KINDS.items()])
def test_tokens_are_those_of_the_prefill_server_by_itself(started: dict[str, Servers], name: str) -> None:
    servers, kind = started[name], KINDS[name]
    servers.await_ready()
    prefill, decode = servers.started["prefill"], servers.started["decode"]
    assert f" {kind.checked} of " in "".join(
        re.findall(r".*write their KV cache as described.*", decode.log.read_text())
    )
    before = received(decode)
    wrong: list[str] = []
    for prompt in PROMPTS:
        tokens = prefill_then_decode(prefill, decode, prompt, TOKENS).tokens
        assert len(set(servers.expected(prompt))) > 3, "output this dull would not show a spoilt cache"
        wrong += filter(None, [servers.wrong(prompt, tokens)])
    assert wrong == []
    assert servers.wrong(PROMPTS[-1], servers.expected(PROMPTS[0])), "any tokens would do"
    moved = received(decode) - before
    print(f"{name}: {moved}")
    assert moved.failed == 0 and moved.tokens >= sum(map(len, PROMPTS)) - len(PROMPTS) * BLOCK
    if kind.drafts:
        made, right = (total(decode, f"vllm:spec_decode_num_{what}_tokens_total") for what in ("draft", "accepted"))
        assert right >= made - 3 * len(PROMPTS) > 0, "the draft model's cache did not come"
