"""Connects to a running engine as a decode engine of the same kind would, and reports on the links.

For each of the engine's ranks an agent, with a cache of the same layout but only one block, fetches a transfer that nobody offers. So
the links are made as for a request, the engine's cache is not touched, and the fetch request is then cancelled.

It runs in a process of its own, `python -m kvxfer.cli.visit`, in which libraries are told to log how they move bytes.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from bisect import bisect_right
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict
from typing import Any

import msgspec
from rich.console import Console

from kvxfer.cli import stand_in
from kvxfer.cli.terminal import verbatim
from kvxfer.config import Config
from kvxfer.control.agent import Agent
from kvxfer.control.directory import Directory
from kvxfer.control.lookup import LookupAnswer, ask_for_prefix, explain, look_up
from kvxfer.errors import ConfigError, KvxferError, PeerError
from kvxfer.failures import Failure, FailureKind
from kvxfer.geometry import Cache, Region, View
from kvxfer.geometry.region import flat_starts
from kvxfer.identity import Address, Handle, Source, TransferId, parse_address
from kvxfer.memory import Space, allocate
from kvxfer.protocol import messages as m
from kvxfer.protocol.values import Ended
from kvxfer.security import Security
from kvxfer.transport import registry
from kvxfer.transport.auto import AUTO, choose
from kvxfer.values import BlockTable, Fetch

ASKED = 50
"""Questions to the directory, of which the round-trip time is the median."""
LINK_S = 15.0
"""Time in which all links must be made."""
PING_S = 0.5
ANSWER_S = 2.0
"""Time in which an engine answers a question for a prefix: with its next step, which may take long."""
LONGEST_S = 120.0


def visit(peer: str, config: Config) -> dict[str, Any]:
    """Visit the engine whose directory is at `HOST:PORT`, with the settings of an engine that would fetch from it.

    Returns what was found, for JSON.

    Raises:
        KvxferError: The visit failed or did not finish in time.
    """
    asked = json.dumps({"peer": peer, "config": msgspec.to_builtins(config)})
    with tempfile.TemporaryFile("w+", errors="replace") as words:
        try:
            done = subprocess.run(
                [sys.executable, "-m", "kvxfer.cli.visit"],
                input=asked,
                stdout=subprocess.PIPE,
                stderr=words,
                text=True,
                env={**_telling(), **os.environ},
                timeout=LONGEST_S,
            )
        except subprocess.TimeoutExpired:
            raise KvxferError(f"the visit to {peer} did not finish within {LONGEST_S:g} s") from None
        words.seek(0)
        said = words.read()
    if done.returncode or not done.stdout:
        raise KvxferError(f"the visit to {peer} failed with status {done.returncode}: {said.strip()[-500:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    for link in found.get("links", ()):
        link["transport"] = registry.load(link["backend"]).carried_by(said)
    return found


def _telling() -> dict[str, str]:
    """Return environment variables that make the libraries of all installed back ends log how they move bytes."""
    found: dict[str, str] = {}
    for name in registry.available():
        with suppress(ConfigError):  # a back end that cannot be loaded makes no link either
            found |= registry.load(name).tells
    return found


def show_visit(console: Console, found: Mapping[str, Any]) -> None:
    """Print what was found, for people."""

    def say(text: str) -> None:
        console.print(verbatim(text))

    if "engine" in found:
        console.print()
        say(
            f"engine {found['engine']!r} at {found['peer']}: {found['ranks']} rank(s), first answer after "
            f"{found['first_answer_ms']} ms, then round trips of {found['round_trip_ms']} ms"
        )
    if asked := found.get("prefixes"):
        now = "not at once" if asked["asked_now_s"] is None else f"one after {asked['asked_now_s'] * 1e3:.1f} ms now"
        say(
            f"prefixes that others asked it for: {asked['inquiries']} questions, {asked['held']} of them held, {asked['offered']} tokens "
            f"offered, {asked['refused']} refused for want of room; answers after {asked['answer_s'] * 1e3:.1f} ms (median), {now}"
        )
        say(
            f"prefixes that it asked others for: {asked['asked']} requests, {asked['unanswered']} unanswered; {asked['found']} tokens "
            f"found, {asked['loaded']} loaded, {asked['dear']} computed because that was faster, {asked['recomputed']} recomputed"
        )
    for link in found.get("links", ()):
        trip = "no answer" if link["round_trip"] is None else f"ping {link['round_trip'] * 1e3:.3f} ms"
        by = f" by {link['transport']}" if link["transport"] else ""
        say(f"link to {link['peer']}: {link['backend']}{by}, {'up' if link['up'] else 'not made'}, {trip}")
    if found.get("memory", "") != found.get("peer_memory", ""):
        say(
            f"its cache is in {found['peer_memory']} memory, which this process cannot allocate: the link was made with "
            f"{found['memory']} memory instead"
        )
    if found.get("peer_elastic"):
        say("its cache is elastic: back ends that hold on to its pages move it staged")
    for row in found.get("candidates", ()):
        say(f"  {row['backend']}: {row['against'] or 'in use'}")
    if "measured" in found:
        for way, words in (("from_peer", "from the peer"), ("to_peer", "to the peer")):
            got = found["measured"][way]
            if "failure" in got:
                say(f"{words}: {got['failure']}")
            else:
                long, short = got["bytes"]
                say(
                    f"{words}: {got['GB_per_s']:g} GB/s ({got['GB_per_s'] * 8e3:g} Mbit/s) for {long / (1 << 20):g} MiB, {got['ms']} ms "
                    f"for {short >> 10} KiB"
                )
    elif "links" in found:
        say(
            "GB/s: not measured, because the engine's memory belongs to its requests; to measure the link, run kvxfer doctor "
            "--stand-in cpu --config FILE on its host, with its settings but another port, and give that one's address to --peer"
        )


def _visit(peer: str, config: Config) -> dict[str, Any]:
    target = parse_address(peer)
    report: dict[str, Any] = {"peer": peer}
    try:
        found = look_up(target.host, target.port, Security.of(config), config.peer_timeout, ASKED)
    except PeerError as e:
        return report | {
            "failure": msgspec.to_builtins(Failure.of(e, FailureKind.PEER_UNREACHABLE, f"directory {peer}"))
        }
    report |= {
        "engine": found.engine.engine,
        "ranks": len(found.engine.ranks),
        "first_answer_ms": round(found.first_s * 1e3, 3),
        "round_trip_ms": round(statistics.median(found.round_trips) * 1e3, 3),
        "prefixes": _prefixes(target, config),
    }
    source = Source(target.host, target.port, found.engine.epoch)
    try:
        report |= _greet(source, found, config)
        if found.engine.engine == stand_in.NAME and "failure" not in report:
            report["measured"] = stand_in.measure(source, config, report["device"])
        return report
    except (KvxferError, OSError) as e:
        return report | {"failure": msgspec.to_builtins(Failure.of(e, peer=peer))}


def _prefixes(target: Address, config: Config) -> dict[str, Any] | None:
    """Return what became of questions for prefixes there, and how soon one is answered now; None if it does not say."""
    security = Security.of(config)
    try:
        told = explain(target.host, target.port, security, config.peer_timeout, m.Explain(most=1)).prefixes
        took = ask_for_prefix(target.host, target.port, security, ANSWER_S)
    except PeerError:
        return None
    return msgspec.structs.asdict(told) | {"asked_now_s": took}


def _greet(source: Source, found: LookupAnswer, config: Config) -> dict[str, Any]:
    """Make the links, and return their state."""
    engine = found.engine
    ours = msgspec.structs.replace(
        config, port=0, transfer_timeout=LINK_S, peer_timeout=4 * PING_S, staging_bytes=config.staging_bytes or 1 << 20
    )
    kept: list[Space] = []
    with ExitStack() as opened:
        caches = [_like(rank.cache, kept) for rank in engine.ranks]
        agents = [opened.enter_context(Agent(cache, ours, "doctor", dict(engine.facts))) for cache in caches]
        directory = opened.enter_context(Directory(ours, "doctor", engine.facts))
        directory.publish(tuple(agent.descriptor for agent in agents))
        own = directory.source if len(agents) > 1 else None
        hello, name = Handle("hello"), TransferId.routed(f"doctor-{directory.epoch:x}")
        began = time.monotonic()
        for agent in agents:
            rows = BlockTable.of([[0] for _ in agent.cache.groups])
            agent.fetch(Fetch(hello, name, b"nothing", source, rows, 0, 1, own))
        failure = _wait(agents, began + LINK_S)
        links = [link for agent in agents for link in agent.links() if link.role == "consumer"]
        report: dict[str, Any] = {"links": [asdict(link) for link in links]}
        if failure is not None:
            report["failure"] = msgspec.to_builtins(failure)
        for agent in agents:
            agent.cancel(hello, "this was only a visit of kvxfer doctor")
    device = next(region.device for cache in caches for region in cache.regions)
    theirs = {name for rank in engine.ranks for name in rank.backends}
    report["candidates"] = _candidates(device.partition(":")[0], config, theirs, report["links"])
    report["device"] = device
    report["memory"] = device.partition(":")[0]
    report["peer_memory"] = engine.ranks[0].cache.regions[0].device.partition(":")[0]
    report["peer_elastic"] = any(rank.cache.elastic for rank in engine.ranks)
    return report


def _wait(agents: list[Agent], until: float) -> Failure | None:
    """Wait until all links are up and have answered a ping; return why one of them could not be made."""
    while time.monotonic() < until:
        for agent in agents:
            for event in agent.events():
                if isinstance(event, Ended) and event.outcome.failure is not None:
                    return event.outcome.failure
        links = [[link for link in agent.links() if link.role == "consumer"] for agent in agents]
        if all(there and all(link.up and link.round_trip is not None for link in there) for there in links):
            return None
        time.sleep(0.01)
    return Failure(FailureKind.TIMED_OUT, f"the links were not made within {LINK_S:g} s")


def _candidates(memory: str, config: Config, theirs: set[str], links: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Return the back ends, best first, each with the reason ``against`` it, which is empty for those in use."""
    used = {link["backend"] for link in links if link["up"]}
    tried = {name: why for link in links for name, why in link["passed"].items()}
    try:
        choice = choose(memory, msgspec.structs.replace(config, backend=AUTO, backend_options=_by_name(config)))
    except KvxferError as e:
        return [{"backend": AUTO, "against": str(e)}]
    rows = []
    for name in dict.fromkeys([*choice.passed, *choice.backends, *used]):
        if name in used:
            against = ""
        elif name in choice.passed:
            against = choice.passed[name]
        elif name in tried:
            against = tried[name]
        elif config.backend not in (AUTO, name):
            against = (
                f"the setting 'backend' is {config.backend!r}; with 'auto' on both engines this one would be tried"
            )
        elif name not in theirs:
            against = f"the peer does not have it: there, in a checkout, pip install ./backends/{name}, and set 'backend' to 'auto'"
        else:
            against = "it ranks below the one in use"
        rows.append({"backend": name, "against": against})
    return rows


def _by_name(config: Config) -> Mapping[str, Any]:
    return config.backend_options if config.backend == AUTO else {}


def _like(cache: Cache, kept: list[Space]) -> Cache:
    """Return a cache of the same layout with one block, in memory of the same kind if this process can allocate it."""
    regions: list[Region] = []
    views: list[View] = []
    starts = cache.starts
    for view in cache.views:
        one = msgspec.structs.replace(view, blocks=1)
        span = -(-one.extent(cache.groups[view.group].block_tokens) // 4096) * 4096
        device = cache.regions[bisect_right(starts, view.offsets[0]) - 1].device
        space = _have(span * len(view.layers), device)
        kept.append(space)
        begin = flat_starts((*regions, space.region))[-1]
        regions.append(space.region)
        views.append(msgspec.structs.replace(one, offsets=tuple(begin + i * span for i in range(len(view.layers)))))
    return Cache(tuple(regions), cache.groups, tuple(views), cache.rank)


def _have(nbytes: int, device: str) -> Space:
    for there in dict.fromkeys((device, f"{device.partition(':')[0]}:0" if ":" in device else device)):
        try:
            return allocate(nbytes, there)
        except (KvxferError, ValueError):
            continue
    return allocate(nbytes)


def _main() -> None:
    """Read the request from standard input, and print what was found."""
    answer = os.dup(1)
    os.dup2(2, 1)  # what libraries print does not belong in the answer
    asked = json.load(sys.stdin)
    found = _visit(asked["peer"], msgspec.convert(asked["config"], Config))
    os.write(answer, json.dumps(found).encode())


if __name__ == "__main__":
    _main()
