"""Compares two running engines by what their directories say: whether one could load KV from the other."""

from __future__ import annotations

from kvxfer import facts
from kvxfer.config import Config
from kvxfer.control.lookup import look_up
from kvxfer.errors import PeerError
from kvxfer.geometry import Incompatible, Planner, route
from kvxfer.identity import Address
from kvxfer.protocol.messages import EngineDescriptor
from kvxfer.security import Security


def differences(consumer: Address, producer: Address, config: Config) -> list[str]:
    """Return why the engine whose directory is at one address cannot load from the one at the other; empty if it can. Blocks.

    An engine that does not answer is not compared: a visit says why.
    """
    security = Security.of(config)
    try:
        ours, theirs = (look_up(at.host, at.port, security, config.peer_timeout).engine for at in (consumer, producer))
    except PeerError:
        return []
    pair = f"the engine at {consumer} cannot load from the one at {producer}: "
    return [pair + why for why in _reasons(ours, theirs, producer)]


def _reasons(ours: EngineDescriptor, theirs: EngineDescriptor, there: Address) -> list[str]:
    out = []
    if (why := facts.difference(ours.facts, theirs.facts, f"at {there}")) is not None:
        out.append(why)
    by_rank = {rank.cache.rank: rank for rank in theirs.ranks}
    try:
        for rank, share in route([r.cache for r in theirs.ranks], [r.cache for r in ours.ranks]).items():
            mine = next(r for r in ours.ranks if r.cache.rank == rank)
            for source, assignments in share.assignments.items():
                Planner(by_rank[source].cache, mine.cache, assignments)
                if not set(mine.backends) & set(by_rank[source].backends):
                    names = [" or ".join(map(repr, r.backends)) for r in (mine, by_rank[source])]
                    out.append(f"it uses back end {names[0]}, the other {names[1]}; configure the same on both")
    except (Incompatible, ValueError) as e:
        out.append(f"the caches do not fit: {e}")
    return list(dict.fromkeys(out))
