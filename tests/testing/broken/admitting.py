"""Back ends that let others in than the peer of a link."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from kvxfer.testing import FakeTransport
from kvxfer.testing.fake import Endpoint
from kvxfer.testing.network import LinkEnd


class _Admitting(FakeTransport):
    def make_link(self, number: int, mine: Endpoint, theirs: Endpoint) -> LinkEnd:
        meant = theirs.token if theirs.token in self._net._owners else next(self.taken_for(theirs), theirs.token)
        return super().make_link(number, mine, replace(theirs, token=meant))

    def taken_for(self, theirs: Endpoint) -> Iterator[str]:
        """Return the tokens with which one that nobody has passes."""
        raise NotImplementedError


class ComparesFourBytes(_Admitting):
    """Of each token."""

    def taken_for(self, theirs: Endpoint) -> Iterator[str]:
        return (token for token in self._net._owners if token[:8] == theirs.token[:8])


class ComparesNothing(_Admitting):
    """Whoever knows where a peer listens has the newest of its links."""

    def taken_for(self, theirs: Endpoint) -> Iterator[str]:
        return reversed([token for token, owner in self._net._owners.items() if owner.agent == theirs.agent])
