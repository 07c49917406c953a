"""The contract of spaces on a GPU: by our space for it, and by torch's own operations with ours switched off."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

pytest.importorskip("torch")

from kvxfer.memory import registry  # noqa: E402
from kvxfer.testing.spaces.suite import SpaceSuite  # noqa: E402

pytestmark = pytest.mark.gpu


class TestCuda(SpaceSuite):
    space: ClassVar[Any] = registry.load("kvxfer.memory.cuda:CudaSpace", "for tests")
    device = "cuda:0"


@pytest.mark.slow
class TestWithoutTriton(SpaceSuite):
    """By torch's indexing, as where Triton is not installed."""

    space: ClassVar[Any] = TestCuda.space
    device = "cuda:0"

    @pytest.fixture(autouse=True)
    def no_triton(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvxfer.memory.cuda.space.importlib.util.find_spec", lambda name: None)


@pytest.mark.slow
class TestGeneric(SpaceSuite):
    space: ClassVar[Any] = registry.load("kvxfer.memory.torch_space:TorchSpace", "for tests")
    device = "cuda:0"
