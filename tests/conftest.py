"""What all tests share: how a test says that it needs something which may not be installed.

`KVXFER_REQUIRE` (comma-separated names) lists what must be there: a test that needs one of those fails
instead of being skipped, so that a broken environment cannot look like a passing one.
"""

import importlib.util
import os

import pytest

_MODULES = {"vllm": "vllm", "nixl": "nixl", "ucx": "ucxx", "nccl": "nccl", "cma": "kvxfer_cma"}


def require(name: str) -> None:
    """Skip the calling test (or module) if the component is missing; fail if `KVXFER_REQUIRE` names it."""
    if importlib.util.find_spec(_MODULES[name]) is None:
        if name in os.environ.get("KVXFER_REQUIRE", "").split(","):
            pytest.fail(f"{name} is required here (KVXFER_REQUIRE) and not installed", pytrace=False)
        pytest.skip(f"{name} is not installed", allow_module_level=True)


def _has_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and not _has_cuda():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
