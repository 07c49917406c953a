"""What a data thread keeps of links and parts that are gone: nothing."""

from __future__ import annotations

import gc
import tracemalloc
from contextlib import closing
from typing import Any

from kvxfer.data.commands import Disconnect, Disconnected, EndpointMade, MakeEndpoint, Reset, SlotNews
from kvxfer.data.jobs import Job
from kvxfer.errors import TransportError
from kvxfer.protocol import messages as m
from kvxfer.protocol.values import Moved
from kvxfer.testing.fake import FakeTransport
from kvxfer.testing.network import LinkEnd
from kvxfer.transport import Completion, Quieted, Verb
from tests.data.harness import Alone

LINK = b"link"


class Failing(FakeTransport):
    """Its batches fail at the moment in which their link is closed, which makes them quiet."""

    def drop_link(self, number: int, link: LinkEnd) -> None:
        for post in link.posts:
            post.withdrawn = True
            self.complete(Completion(post.number, TransportError("it failed just before"), quiet=False))
        super().drop_link(number, link)


def jobs() -> list[Job]:
    """All that there are in this process, in which other tests have run."""
    return [one for one in gc.get_objects() if type(one) is Job]


def test_parts_that_fail_as_their_link_is_closed() -> None:
    """Each was kept as long as the back end."""
    others = jobs()
    with closing(Alone(lambda options: Failing("consumer", options), delay_s=60.0, quiet="peer_close")) as side:
        for number in range(1, 6):
            side.connect(LINK, number)
            side.move(LINK, number, Verb.READ)
            side.data.post(Disconnect(LINK))
            assert all(end.quiet for end in side.wait(Moved, number))
        assert not [job for job in jobs() if not any(job is other for other in others)]


def test_links_that_are_given_up_while_the_back_end_is_down() -> None:
    """An endpoint was made for each when it was up again, and nobody withdrew it."""
    made: list[FakeTransport] = []
    state = {"broken": False, "down": False}

    class Breaking(FakeTransport):
        def poll(self) -> list[Completion | Quieted]:
            if state["broken"]:
                raise RuntimeError("it broke")
            return super().poll()

    def make(options: dict[str, Any]) -> FakeTransport:
        if state["down"]:
            raise TransportError("it is down")
        made.append(Breaking("consumer", options))
        return made[-1]

    with closing(Alone(make, wakeup=False)) as side:
        state |= {"broken": True, "down": True}
        side.wait(Reset)
        for number in range(1, 6):
            side.data.post(MakeEndpoint(b"%d" % number, number, "fake", "consumer"))
            side.data.post(Disconnect(b"%d" % number))
        side.wait(Disconnected, 5)
        state |= {"broken": False, "down": False}
        side.data.post(MakeEndpoint(LINK, 6, "fake", "consumer"))
        side.wait(EndpointMade, number=6)
        assert len(made) == 2 and len(made[-1].unused) == 1


def test_a_slot_that_is_named_again_and_again() -> None:
    """By a peer, while none is free here: each was kept until one was."""
    with closing(Alone(lambda options: FakeTransport("consumer", options), delay_s=60.0)) as side:
        side.connect(LINK, 1)
        ref = side.move(LINK, 1, Verb.READ, 4096)

        def tell(piece: int, times: int = 1) -> None:
            for _ in range(times):
                side.data.post(SlotNews(ref, m.SlotReady(*ref[2:], piece, 0, 4096)))
            before = len([r for r in side.results if isinstance(r, Disconnected)])
            side.data.post(Disconnect(b"another"))  # answered after those
            side.wait(Disconnected, before + 1)

        for piece in range(1, 8):  # more than a link may have slots for; the first one is shorter
            tell(piece)
        tracemalloc.start()
        tell(7, 10_000)
        grown = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert not [end for end in side.results if isinstance(end, Moved)]
        assert grown < 100_000
