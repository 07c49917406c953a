"""The fake keeps the contract with any subset of verbs, so that the session's tests over it prove something."""

from typing import Any, ClassVar

import numpy as np
import pytest

from kvxfer.errors import TransportError
from kvxfer.testing import FakeTransport, Network
from kvxfer.transport import Batch, Verb
from tests.testing.on_fake import OnFake


@pytest.mark.slow
class TestFakeReads(OnFake):
    options: ClassVar[dict[str, Any]] = {"network": Network(), "verbs": ["read"]}


@pytest.mark.slow
class TestFakeWrites(OnFake):
    options: ClassVar[dict[str, Any]] = {"network": Network(), "verbs": ["write"]}


@pytest.mark.slow
class TestFakeSends(OnFake):
    options: ClassVar[dict[str, Any]] = {"network": Network(), "verbs": ["send", "recv"]}


class TestFakeWithEverything(OnFake):
    options: ClassVar[dict[str, Any]] = {"network": Network()}


@pytest.mark.slow
class TestFakeThatMustBePolled(OnFake):
    """No descriptor to wake by, an abort that takes the whole peer along, memory that is quiet only after closing."""

    options: ClassVar[dict[str, Any]] = {"network": Network(), "wakeup": False, "abort": "peer", "quiet": "peer_close"}


@pytest.mark.slow
class TestFakeThatGetsQuietLater(OnFake):
    """A failed batch goes on for a while, and then it is said that it has become quiet."""

    options: ClassVar[dict[str, Any]] = {"network": Network(), "quiet": "later"}


def test_who_connects_to_a_link_that_was_closed_finds_nobody() -> None:
    """As anywhere else. It had waited for ever, and the network had kept the ends of all links that were closed."""
    options = {"network": Network()}
    a, b = FakeTransport("a", options), FakeTransport("b", options)
    mine, theirs = a.endpoint(), b.endpoint()
    a.disconnect(a.connect(mine, theirs))
    lost = b.lost(b.connect(theirs, mine))
    assert lost is not None and "'a'" in lost.detail


def test_an_endpoint_is_good_for_one_link() -> None:
    """All back ends have this of ``Base``."""
    options = {"network": Network()}
    a, b = FakeTransport("a", options), FakeTransport("b", options)
    mine = a.endpoint()
    a.connect(mine, b.endpoint())
    with pytest.raises(TransportError, match="must be an unused endpoint"):
        a.connect(mine, b.endpoint())


@pytest.mark.parametrize("verb", [Verb.SEND, Verb.RECV])
def test_no_number_of_a_stream_is_taken_twice(verb: Verb) -> None:
    options = {"network": Network()}
    a, b = FakeTransport("a", options), FakeTransport("b", options)
    peer, nothing = a.connect(a.endpoint(), b.endpoint()), np.zeros(0, np.int64)
    batch = Batch(verb, peer, a.register([]), nothing, nothing, stream=5)
    a.submit(batch)
    with pytest.raises(TransportError, match="must rise"):
        a.submit(batch)
