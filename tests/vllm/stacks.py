"""Code of the stacks that route and run engines, each a file of a wheel that is not installed: what its program shapes params by.

Neither runs without the rest of its stack; these files do, with what they import and do not use for params as an empty module.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

FOLDER = Path(sys.prefix, "stacks")
"""Where `make` puts Ray and Dynamo (see the Makefile), outside of what Python imports from by itself."""

ROUTER = Path(__file__).parents[2] / ".venv-router" / "bin"
"""Where `make` puts vllm-router."""

DYNAMO = "dynamo/vllm/kv_connector_protocols.py"
RAY = "ray/llm/_internal/serve/engines/vllm/kv_transfer/base.py"


def lack() -> str | None:
    """Why `load` cannot load them, or None if it can."""
    missing = [file for file in (DYNAMO, RAY) if not (FOLDER / file).is_file()]
    return f"{', '.join(missing)} is not in {FOLDER}" if missing else None


def router() -> str | None:
    """Return the program vllm-router, if it is here."""
    return shutil.which("vllm-router", path=f"{ROUTER}{os.pathsep}{os.environ.get('PATH', os.defpath)}")


def load(file: str) -> Any:
    """Return one of them as a module."""
    return _loaded(FOLDER / file)


def for_ray(base: Any) -> Any:
    """Return kvxfer's module for Ray, with `base` as what it takes from there."""
    above = RAY.removesuffix(".py").split("/")
    names = [".".join(above[: i + 1]) for i in range(len(above))]
    found = importlib.util.find_spec("kvxfer_vllm.ray")
    assert found is not None and found.origin is not None
    with mock.patch.dict(sys.modules, {name: types.ModuleType(name) for name in names} | {names[-1]: base}):
        return _loaded(Path(found.origin))


def _loaded(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"stack_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    ray = types.ModuleType("ray")
    ray.serve = types.ModuleType("ray.serve")  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, {"ray": ray, "ray.serve": ray.serve}):
        spec.loader.exec_module(module)
    return module
