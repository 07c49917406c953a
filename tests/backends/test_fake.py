"""The fake keeps the contract with any subset of verbs, so that the session's tests over it prove something."""

from typing import Any, ClassVar

from kvxfer.testing import Network
from tests.testing.on_fake import OnFake


class TestFakeReads(OnFake):
    options: ClassVar[dict[str, Any]] = {"network": Network(), "verbs": ["read"]}


class TestFakeWrites(OnFake):
    options: ClassVar[dict[str, Any]] = {"network": Network(), "verbs": ["write"]}


class TestFakeSends(OnFake):
    options: ClassVar[dict[str, Any]] = {"network": Network(), "verbs": ["send", "recv"]}


class TestFakeWithEverything(OnFake):
    options: ClassVar[dict[str, Any]] = {"network": Network()}


class TestFakeThatMustBePolled(OnFake):
    """No descriptor to wake by, an abort that takes the whole peer along, memory that is quiet only after closing."""

    options: ClassVar[dict[str, Any]] = {"network": Network(), "wakeup": False, "abort": "peer", "quiet": "peer_close"}


class TestFakeThatGetsQuietLater(OnFake):
    """A failed batch goes on for a while, and then it is said that it has become quiet."""

    options: ClassVar[dict[str, Any]] = {"network": Network(), "quiet": "later"}
