"""The manifests are ones that Kubernetes takes, with settings that engines take, and times that fit together."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvxfer.config import Config
from tests.conftest import require

FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"
RELEASES = ("1.29", "1.34")


def kustomized(file: Path) -> list[tuple[Path, dict[str, Any]]]:
    """What `kubectl apply -k` makes of a folder: its resources, or a folder's, with patches of `add` and `replace`."""
    made = yaml.safe_load(file.read_text())
    found = []
    for name in made["resources"]:
        there = (file.parent / name).resolve()
        if there.is_dir():
            found += [one for _, one in kustomized(there / "kustomization.yaml")]
        else:
            found += list(yaml.safe_load_all(there.read_text()))
    for patch in made.get("patches", ()):
        kind, name = patch["target"]["kind"], patch["target"]["name"]
        [target] = [one for one in found if (one["kind"], one["metadata"]["name"]) == (kind, name)]
        for step in yaml.safe_load(patch["patch"]):
            *path, last = [part.replace("~1", "/") for part in step["path"].split("/")[1:]]
            into: Any = target
            for part in path:
                into = into[int(part) if isinstance(into, list) else part]
            key = int(last) if isinstance(into, list) else last
            assert (step["op"] == "add") is not (isinstance(into, list) or key in into), step
            into[key] = step["value"]
    return [(file, one) for one in found]


MANIFESTS = [one for file in sorted(FOLDER.glob("*/kustomization.yaml")) for one in kustomized(file)]
ENGINES = [
    one for _, one in MANIFESTS if one["kind"] in ("StatefulSet", "Deployment") and one["metadata"]["name"] != "router"
]


def named(value: Any) -> str:
    file, one = value
    return f"{file.parent.name} {one['kind']} {one['metadata']['name']}"


def vllm(engine: dict[str, Any]) -> dict[str, Any]:
    """The container of the engine itself."""
    [found] = [c for c in engine["spec"]["template"]["spec"]["containers"] if c["name"] == "vllm"]
    return found


def seconds(container: dict[str, Any]) -> int:
    [found] = [int(a.partition("=")[2]) for a in container["args"] if a.startswith("--shutdown-timeout=")]
    return found


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("manifest", MANIFESTS, ids=named)
def test_kubernetes_takes_it(manifest: tuple[Path, dict[str, Any]], release: str) -> None:
    require("kubernetes_validate")
    import kubernetes_validate

    kubernetes_validate.validate(manifest[1], release, strict=True)


def test_there_are_engines_of_both_roles_for_both_stacks() -> None:
    assert sorted(engine["metadata"]["name"] for engine in ENGINES) == ["decode"] * 3 + ["prefill"] * 3


def test_the_compose_file_runs_engines_and_router_with_what_they_take() -> None:
    compose = yaml.safe_load((FOLDER.parent / "container" / "compose.yaml").read_text())
    for name, role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        command = compose["services"][name]["command"]
        transfer = json.loads(command[command.index("--kv-transfer-config") + 1])
        assert (
            transfer["kv_role"] == role
            and Config.from_mapping(transfer["kv_connector_extra_config"]).advertise == "auto"
        )
    router = compose["services"]["router"]
    assert set(router["depends_on"]) == {"prefill", "decode"} and "http://prefill:8000" in router["command"]
    root = FOLDER.parents[1]
    for engine in compose["services"].values():
        if "build" in engine:
            assert (root / engine["build"]["dockerfile"]).is_file()
    for file in (FOLDER.parent / "container").glob("*Containerfile"):
        for folder in re.findall(r" \./([\w/]+)", file.read_text()):
            assert (root / folder / "pyproject.toml").is_file(), folder


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: f"{e['kind']} {e['metadata']['name']}")
def test_engines_take_their_settings(engine: dict[str, Any]) -> None:
    container = vllm(engine)
    text = container["args"][container["args"].index("--kv-transfer-config") + 1]
    transfer = json.loads(text)
    config = Config.from_mapping(transfer.pop("kv_connector_extra_config"))
    environment = {row["name"] for row in container.get("env", ())}
    assert config.advertise == "auto" or "VLLM_NIXL_SIDE_CHANNEL_HOST" in environment, "peers would be told loopback"
    mounts = [row["mountPath"] for row in container["volumeMounts"]]
    assert str(Path(config.key_file or "").parent) in mounts and "/dev/shm" in mounts
    assert transfer == {
        "kv_connector": "KVXferConnector",
        "kv_role": {"prefill": "kv_producer", "decode": "kv_consumer"}[engine["metadata"]["name"]],
        "kv_load_failure_policy": "recompute",
    }


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: f"{e['kind']} {e['metadata']['name']}")
def test_an_engine_has_time_to_be_fetched_from(engine: dict[str, Any]) -> None:
    pod = engine["spec"]["template"]["spec"]
    slept = int(vllm(engine)["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > slept + seconds(vllm(engine))


def test_the_router_is_told_of_each_engine_by_its_name() -> None:
    plain = [one for file, one in MANIFESTS if file.parent.name == "plain"]
    [router] = [one for one in plain if one["metadata"]["name"] == "router" and one["kind"] == "Deployment"]
    urls = re.findall(
        r"http://(\w+)-(\d)\.(\w+):(\d+)", " ".join(router["spec"]["template"]["spec"]["containers"][0]["args"])
    )
    wanted = []
    for engine in (e for e in plain if e["kind"] == "StatefulSet"):
        [port] = [row["containerPort"] for row in vllm(engine)["ports"] if row["name"] == "http"]
        name = engine["metadata"]["name"]
        wanted += [(name, str(n), engine["spec"]["serviceName"], str(port)) for n in range(engine["spec"]["replicas"])]
    assert sorted(urls) == sorted(wanted)
