"""The connector is found both ways: by module path, and by name alone through vLLM's plugins."""

from __future__ import annotations

import logging
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import require

require("vllm")


def test_by_name_alone() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    (point,) = [p for p in entry_points(group="vllm.general_plugins") if p.name == "kvxfer"]
    point.load()()
    point.load()()  # vLLM may load plugins more than once in a process
    found = KVConnectorFactory.get_connector_class_by_name("KVXferConnector")
    assert found.__module__ == "kvxfer_vllm.connector"


def test_log_lines_go_where_vllms_go_unless_somebody_said_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvxfer_vllm import settings as logs

    ours, vllm, own = logging.getLogger("kvxfer"), logging.getLogger("vllm"), logging.NullHandler()
    for name, value in {"handlers": [own], "propagate": False, "level": logging.NOTSET}.items():
        monkeypatch.setattr(ours, name, value)
    monkeypatch.setattr(vllm, "handlers", [logging.StreamHandler()])
    logs.share()
    assert ours.handlers == [own]
    monkeypatch.setattr(ours, "handlers", [])
    logs.share()
    assert ours.handlers == vllm.handlers
    assert ours.level == vllm.level
    monkeypatch.undo()
    ours.setLevel(ours.level)  # forgets what it kept of levels


@pytest.mark.parametrize("path", ["kvxfer_vllm", None])
def test_as_vllm_looks_for_it(path: str | None) -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    import kvxfer_vllm

    kvxfer_vllm.register()
    config: Any = SimpleNamespace(kv_connector="KVXferConnector", kv_connector_module_path=path)
    assert KVConnectorFactory.get_connector_class(config) is kvxfer_vllm.KVXferConnector
