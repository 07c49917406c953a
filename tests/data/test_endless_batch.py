"""A batch that outlives its link: it costs the back end a reset, and no later link of that peer."""

from __future__ import annotations

from contextlib import closing

from kvxfer.data.commands import Disconnect, LinkBroken, Reset
from kvxfer.protocol.values import Moved
from kvxfer.testing.fake import FakeTransport
from kvxfer.testing.network import LinkEnd
from kvxfer.transport import Verb
from tests.data.harness import Alone

LINK = b"link"


class Endless(FakeTransport):
    """The batches of a link that is closed end only when the back end is closed."""

    def drop_link(self, number: int, link: LinkEnd) -> None:
        pass


def test_a_batch_that_outlives_its_link_does_not_cost_the_next_one() -> None:
    """The next link was broken for it each time that it had been made, and its memory was never released."""
    with closing(Alone(lambda options: Endless("receiver", options), verbs=["send", "recv"])) as side:
        side.connect(LINK, 1)
        side.move(LINK, 1, Verb.RECV)
        side.data.post(Disconnect(LINK))
        side.connect(LINK, 2)
        (end,) = side.wait(Moved)
        assert end.quiet
        assert side.wait(Reset) and not [r for r in side.results if isinstance(r, LinkBroken)]
