"""Code of the stacks that route and run engines, each a file of a wheel that is not installed: what its program shapes params by.

Neither runs without the rest of its stack; these files do, with what they import and do not use for params as an empty module.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

FOLDER = Path(sys.prefix, "stacks")
"""Where `make` puts Ray and Dynamo (see the Makefile), outside of what Python imports from by itself."""

DYNAMO = "dynamo/vllm/kv_connector_protocols.py"
RAY = "ray/llm/_internal/serve/engines/vllm/kv_transfer/base.py"


def lack() -> str | None:
    """Why `load` cannot load them, or None if it can."""
    missing = [file for file in (DYNAMO, RAY) if not (FOLDER / file).is_file()]
    return f"{', '.join(missing)} is not in {FOLDER}" if missing else None


def load(file: str) -> Any:
    """Return one of them as a module."""
    spec = importlib.util.spec_from_file_location(f"stack_{Path(file).stem}", FOLDER / file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    ray = types.ModuleType("ray")
    ray.serve = types.ModuleType("ray.serve")  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, {"ray": ray, "ray.serve": ray.serve}):
        spec.loader.exec_module(module)
    return module
