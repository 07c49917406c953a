"""The consumer's routes to producers: by source, the links that they lead over, and which fetches use each link."""

from __future__ import annotations

from collections.abc import Iterable

from kvxfer.failures import Failure, FailureKind
from kvxfer.identity import Source
from kvxfer.protocol.fetch_record import FetchRecord, RankFetch
from kvxfer.protocol.index import Index
from kvxfer.protocol.pace import LinkPace
from kvxfer.protocol.values import Action, Close, Dial, LinkId, LinkInfo, Moved, Resolve, Resolved


class Routes:
    """Routes to sources, and the links that they lead over.

    A route is looked up once, and again after a link that it leads over has been given up.

    Attributes:
        links: What is known of each link; ``None`` while it is being made.
        paces: The pace of each link over which something has come.
    """

    def __init__(self) -> None:
        self.links: dict[LinkId, LinkInfo | None] = {}
        self.paces: dict[LinkId, LinkPace] = {}
        self._routes: dict[Source, Resolved] = {}
        self._prepared: set[Source] = set()  # sources whose links are to be made once there is a route
        self._behind: Index[LinkId, Source] = Index()  # the sources whose routes lead over a link
        self._seeking: Index[Source, FetchRecord] = Index()  # the fetches whose route is not known yet
        self._over: Index[LinkId, FetchRecord] = Index()  # the fetches that use a link

    def get(self, source: Source) -> Resolved | None:
        return self._routes.get(source)

    def seek(self, f: FetchRecord) -> list[Action]:
        """Look up the route for a fetch, which ``resolved`` will return."""
        self._seeking.add(f.spec.source, f)
        return [Resolve(f.spec.source, f.spec.own)]

    def prepare(self, source: Source, own: Source | None) -> list[Action]:
        """Make the links to a source before anything is fetched over them."""
        route = self._routes.get(source)
        if route is not None:
            return self.dial(rank.link for rank in route.ranks)
        self._prepared.add(source)
        return [Resolve(source, own)]

    def resolved(self, source: Source, route: Resolved | Failure) -> list[FetchRecord]:
        """Record a route, or handle the reason why there is none; return the fetches that have waited for it."""
        if isinstance(route, Resolved):
            self._routes[source] = route
            for rank in route.ranks:
                self._behind.add(rank.link, source)
        return self._seeking.pop(source)

    def prepared(self, source: Source) -> list[Action]:
        """Make the links that ``prepare`` asked for, if there is a route now."""
        if source not in self._prepared:
            return []
        self._prepared.remove(source)
        route = self._routes.get(source)
        return [] if route is None else self.dial(rank.link for rank in route.ranks)

    def unused(self, route: Resolved) -> list[Action]:
        """Give up the links of a route that are not made, because the fetch that looked it up needs it no more.

        A route is otherwise forgotten with its links, so that this one would never be.
        """
        why = Failure(FailureKind.CANCELLED, "nobody needs it any more")
        return [action for rank in route.ranks if rank.link not in self.links for action in self.close(rank.link, why)]

    def dial(self, links: Iterable[LinkId]) -> list[Action]:
        """Make the links among these that do not exist."""
        new = [link for link in links if link not in self.links]
        self.links |= dict.fromkeys(new)
        return [Dial(link) for link in new]

    def redial(self, link: LinkId) -> list[Action]:
        """Make a broken link again."""
        self.links[link] = None
        return [Dial(link)]

    def close(self, link: LinkId, why: Failure) -> list[Action]:
        """Give a link up. Routes that lead over it have to be looked up again."""
        self.links.pop(link, None), self.paces.pop(link, None)
        for source in self._behind.pop(link):
            self._routes.pop(source, None)
        return [Close(link, why)]

    def moved(self, done: Moved, now: float) -> None:
        """Record that a part has come over a link."""
        link = done.ref.link
        if link not in self.paces and link in self.links:
            self.paces[link] = LinkPace()
        if link in self.paces:
            self.paces[link].took(done.nbytes, done.seconds, now)

    def slow(self, link: LinkId, info: LinkInfo, tokens: int) -> bool:
        """Return whether this number of tokens takes so long over a link that single bands of layers are asked for."""
        pace = self.paces.get(link)
        return pace is not None and pace.slow(int(tokens * info.planner.token_bytes))

    def up(self, link: LinkId, info: LinkInfo) -> list[tuple[FetchRecord, RankFetch]]:
        """Record that a link is up, unless it has been given up; return what uses it."""
        if link not in self.links:
            return []
        self.links[link] = info
        return self.users(link)

    def use(self, f: FetchRecord) -> None:
        for rank in f.rank_fetches:
            self._over.add(rank.spec.link, f)

    def users(self, link: LinkId) -> list[tuple[FetchRecord, RankFetch]]:
        """Return the fetches that use a link, each with its rank fetch over it."""
        return [(f, f.ranks[link]) for f in self._over.of(link) if f.ranks is not None]

    def leave(self, f: FetchRecord) -> None:
        """Forget a fetch that is over."""
        if f.ranks is None:
            self._seeking.remove(f.spec.source, f)
        for rank in f.rank_fetches:
            self._over.remove(rank.spec.link, f)
