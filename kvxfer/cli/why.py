"""`kvxfer why`: what became of a request, on both engines, and why."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import Annotated, Any

import typer
from msgspec.structs import asdict as fields_of
from msgspec.structs import replace

from kvxfer.cli.addresses import peer_address
from kvxfer.cli.doctor import read_settings
from kvxfer.cli.terminal import failed_at, make_console, verbatim
from kvxfer.cli.verdict import Finding, judge, tale
from kvxfer.control.lookup import explain
from kvxfer.errors import PeerError
from kvxfer.failures import Failure
from kvxfer.identity import Address, IdentityError, parse_address
from kvxfer.protocol.messages import MAX_STORIES, Explain, Explained, Story
from kvxfer.security import Security

ANSWER_S = 5.0
"""Seconds in which a directory answers."""
NOT_FOUND = 3


def why(
    request: Annotated[
        str, typer.Argument(help="The request's id, or a part of it. Without it: the last requests that failed.")
    ] = "",
    decode: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="The directory of the decode engine ('advertise' and 'port').")
    ] = "",
    prefill: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="The directory of the prefill engine. [default: the one from which the decode engine loaded]",
        ),
    ] = "",
    config: Annotated[
        str, typer.Option(help="Settings of an engine, for 'key_file': JSON, or the path of a JSON file.")
    ] = "{}",
    last: Annotated[int, typer.Option(help="How many requests to show.", min=1, max=MAX_STORIES)] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Report what became of a request on both engines, in order, with a verdict: who waited, how much came how fast, what to set.

    Each engine remembers its last thousand requests that were delivered, as many that failed, and as many without a transfer.
    Times are of this host's clock, whatever the clocks of the engines say.

    Exits with 0 if nothing went wrong, 1 if a request failed or was not transferred, 2 if the arguments are wrong, 3 if no engine knows
    the request or none can be asked.
    """
    if not (decode or prefill):
        raise typer.BadParameter("give the address of an engine's directory", param_hint="--decode or --prefill")
    asker = _Asker(Security.of(read_settings(config)))
    request = request[:2000].encode(errors="replace").decode()  # a shell passes on bytes that are no text
    asked = Explain(request=request, most=last)
    at = (
        peer_address(text, option) if text else None for text, option in ((decode, "--decode"), (prefill, "--prefill"))
    )
    found = _stories(asker, asked, *at)
    report = {
        "requests": [
            {
                "verdict": asdict(verdict),
                "decode": consumer and _plain(consumer),
                "prefill": producer and _plain(producer),
            }
            for consumer, producer, verdict in found
        ],
        "errors": asker.errors,
    }
    if as_json:
        typer.echo(json.dumps(report))
    else:
        _show(request, found, asker)
    if not found:
        quiet = not request and asker.answered and not asker.errors
        raise typer.Exit(0 if quiet else NOT_FOUND)
    if not all(verdict.ok for _, _, verdict in found):
        raise typer.Exit(1)


Found = tuple[Story | None, Story | None, Finding]


class _Asker:
    """Asks directories, and keeps what went wrong with that."""

    def __init__(self, security: Security) -> None:
        self._security = security
        self.errors: list[str] = []
        self.answered = 0
        self.knowing: set[str] = set()  # the addresses that have answered and remember requests

    def __call__(self, at: Address | None, asked: Explain) -> tuple[Story, ...]:
        if at is None:
            return ()
        try:
            answer = explain(at.host, at.port, self._security, ANSWER_S, asked)
        except PeerError as e:
            self.errors.append(failed_at(at, Failure.of(e)))
            return ()
        return self._stories(at, answer)

    def _stories(self, at: Address, answer: Explained) -> tuple[Story, ...]:
        if not answer.kept:
            self.errors.append(f"{at}: engine {answer.engine!r} keeps no stories of requests; its log has them")
            return ()
        self.answered += 1
        self.knowing.add(str(at))
        behind = time.time() - answer.now  # by as much as its clock differs from this host's, and the answer took
        return tuple(replace(story, at=story.at + behind) for story in answer.stories)


def _stories(asker: _Asker, asked: Explain, decode: Address | None, prefill: Address | None) -> list[Found]:
    """Return the requests as both sides know them, the latest first."""
    loads = [story for story in asker(decode, asked) if story.role != "producer"]
    offers: list[Story] = []
    where = {prefill} if prefill is not None else {_source(s) for s in loads if s.role == "consumer"}
    keys = tuple(dict.fromkeys(story.key for story in loads if len(story.key) == 8))
    for at in sorted(where - {None}, key=str):
        # Those of the same transfer, and if nobody loads, those of the same name, or that failed.
        question = Explain(asked.request, keys[:MAX_STORIES], MAX_STORIES if keys else asked.most)
        offers += [story for story in asker(at, question) if story.role != "consumer"]
    out: list[Found] = []
    told: set[int] = set()
    for load in loads:
        theirs = next((s for s in offers if load.key and s.key == load.key), None)
        if theirs is None and load.role == "none":
            theirs = next((s for s in offers if id(s) not in told), None) if len(loads) == 1 else None
        told.add(id(theirs))
        peer = load.peer if prefill is None else str(prefill)
        unknown = peer if theirs is None and peer in asker.knowing else ""
        out.append((load, theirs, judge(load, theirs, unknown)))
    if asked.request or decode is None:
        out += [(None, s, judge(None, s)) for s in offers if id(s) not in told and s.key not in keys]
    return out


def _source(story: Story) -> Address | None:
    try:
        return parse_address(story.peer)
    except IdentityError:
        return None


def _plain(story: Story) -> dict[str, Any]:
    return {**fields_of(story), "key": story.key.hex()}


def _show(request: str, found: list[Found], asker: _Asker) -> None:
    console = make_console()

    def say(text: str) -> None:
        console.print(verbatim(text))

    for consumer, producer, verdict in found:
        one = consumer or producer
        assert one is not None
        say(f"request {one.request}" + (f", transfer {one.transfer}" if one.transfer else ""))
        rows = [(at, "decode", what) for at, what in (tale(consumer) if consumer else ())]
        rows += [(at, "prefill", what) for at, what in (tale(producer) if producer else ())]
        begun = min(at for at, _, _ in rows)
        for at, side, what in sorted(rows, key=lambda row: row[0]):
            clock = time.strftime("%H:%M:%S", time.localtime(at))
            say(f"  {clock} {at - begun:+9.3f} s  {side:8}{what}")
        console.print(f"[bold]{'ok' if verdict.ok else 'verdict'}:[/] {verbatim(verdict.says)}")
        if verdict.do:
            console.print(f"[bold]do:[/] {verbatim(verdict.do)}")
        console.print()
    for error in asker.errors:
        console.print(f"[red]problem:[/] {verbatim(error)}")
    if not found and request and asker.answered:
        say(
            f"no engine that was asked knows request {request!r}: the router sent it to another one, it had no params, it was more than "
            "a thousand requests ago, or the engine has restarted since"
        )
    elif not found and not asker.errors:
        say("no request has failed")
