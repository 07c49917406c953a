"""``kvxfer bench conversation``: turns of conversations on real servers, with the KV of earlier answers loaded or computed again.

The same conversations run in turns: with a router that tells the prefill server nothing of earlier turns, with kvxfer and a router that
does, and (``--nixl``) with vLLM's NixlConnector in its bidirectional mode. Prints how many tokens the prefill server computed at each
turn, how long the client waited for the first token, and how long the prefill server takes for the same prompt once it has it. Before
each turn it answers another, short prompt: while a long answer is decoded it has nothing to do here, and a GPU and a processor that have
rested are slow for some milliseconds. With ``--check`` it says whether both are right: tokens, as a plain server has them, and how many
prefill computes.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from kvxfer.cli.terminal import progress
from kvxfer_bench.vllm.conversations import FLAGS, SCHEMAS, Conversation, PlayedTurn, reply_of
from kvxfer_vllm.demo.metrics import total
from kvxfer_vllm.demo.model import SHAPES, write_model, write_shape
from kvxfer_vllm.demo.servers import BLOCK, Server, await_ready, connector, ended_by_sigterm, ended_together, free_port

RECOMPUTE, LOAD, NIXL = "recompute", "load", "nixl"
"""The three ways; the first two share their servers."""
FIRST_TOKEN = "vllm:time_to_first_token_seconds_sum"
SHORT = 16
"""Tokens at most of an answer that no turn continues."""
VOCABULARY = 200
"""Prompts are made of the tokens from 1 up to this one, which every model here has."""


def conversation(
    turns: Annotated[int, typer.Option(min=2, help="Turns of a conversation.")] = 5,
    conversations: Annotated[int, typer.Option(min=1, help="Conversations, one after the other.")] = 3,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the first prompt.")] = 200,
    answer: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 200,
    more: Annotated[int, typer.Option(min=1, help="Tokens that each further turn adds to the history.")] = 30,
    schema: Annotated[
        str, typer.Option(help="How the router says where the last turn's KV is: " + ", ".join(SCHEMAS))
    ] = "nixl",
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Also compare each answer with that of a plain server. Exit with 1 if one differs, or if prefill computes more at a turn "
            f"than what is new and a block of {BLOCK} tokens.",
        ),
    ] = False,
    backend: Annotated[str, typer.Option(help="Back end that moves the KV.")] = "tcp",
    model: Annotated[str, typer.Option(help="A shape of a model: " + ", ".join(SHAPES))] = "tiny",
    gpus: Annotated[
        str, typer.Option(help="GPUs of the prefill and of the decode server, as 0,1; none: processors.")
    ] = "",
    nixl: Annotated[bool, typer.Option(help="Measure vLLM's NixlConnector in its bidirectional mode, too.")] = False,
    flags: Annotated[str, typer.Option(help="Further flags of each server, separated by spaces.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """Time turns of conversations on real servers: the KV of earlier answers loaded from the decode server, or computed again."""
    if schema not in SCHEMAS:
        raise typer.BadParameter(f"{schema!r} is none of {', '.join(SCHEMAS)}", param_hint="--schema")
    say = progress()
    with ended_by_sigterm(), tempfile.TemporaryDirectory() as folder:
        path, logs = Path(folder) / "model", Path(folder)
        further = [*FLAGS, *flags.split()]
        if model == "tiny":
            write_model(path)
        else:
            write_shape(path, SHAPES[model])
            further += ["--load-format", "dummy", "--dtype", SHAPES[model].dtype, "--max-model-len", str(32768)]
        on = gpus.split(",") if gpus else []
        with ended_together() as begun:

            def pair(name: str, transfer: Mapping[str, Any]) -> tuple[Server, Server]:
                both = []
                for side, role in enumerate(("prefill", "decode")):
                    env = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
                    env |= {"CUDA_VISIBLE_DEVICES": on[side % len(on)]} if on else {}
                    both.append(Server(f"{name}-{role}", path, logs, transfer, further, env))
                begun.extend(both)
                return both[0], both[1]

            ours = pair("kvxfer", connector("kv_both", {"backend": backend, "ask": "always", "trust_sources": True}))
            ways = {RECOMPUTE: (*ours, None), LOAD: (*ours, schema)}
            plain = Server("plain", path, logs, None, further) if check else None
            begun.extend([plain] if plain else [])
            if nixl:
                extra = {"bidirectional_kv_xfer": True, "kv_recompute_threshold": 16}
                stock = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
                ways[NIXL] = (*pair(NIXL, stock), "nixl")
            await_ready(begun, 600, lambda server: say(f"{server.name} is ready"))
            found: dict[str, list[list[Timed]]] = {way: [] for way in ways}
            for number in range(conversations + 1):  # the first warms up
                for place, (way, (prefill, decode, told)) in enumerate(ways.items()):
                    rng = np.random.default_rng([number, place])
                    talk = Conversation(prefill, decode, told)
                    sizes = (prompt, answer if number else min(answer, prompt), more)
                    one = _converse(talk, (prefill, decode), rng, sizes, turns, plain)
                    if number:
                        found[way].append(one)
                say(f"{number} of {conversations} conversations" if number else "warmed up")
    report = {way: summary(found[way]) for way in ways}
    what = {"prompt": prompt, "answer": answer, "more": more, "backend": backend, "schema": schema}
    wrong = [f"{way}, {fault}" for way in ways if check for fault in faults(found[way], loads=way == LOAD)]
    judged = {"turns_checked": len(ways) * conversations * turns, "wrong": wrong} if check else {}
    typer.echo(json.dumps({**what, **report, **judged}, indent=1))
    if not as_json:
        typer.echo(by_turn(report))
    if wrong:
        raise typer.Exit(1)


@dataclass(frozen=True)
class Timed:
    """One turn.

    Attributes:
        prompt_tokens: The length of its prompt.
        turn: What the servers have done.
        first_s: The seconds from the client's request to its first token.
        cached_s: The seconds that the prefill server takes for the same prompt once it has all of its KV.
        expected: The answer of a plain server, if there is one.
    """

    prompt_tokens: int
    turn: PlayedTurn
    first_s: float
    cached_s: float
    expected: list[int] | None = None


def _converse(
    talk: Conversation,
    pair: tuple[Server, Server],
    rng: np.random.Generator,
    sizes: tuple[int, int, int],
    turns: int,
    plain: Server | None,
) -> list[Timed]:
    """Have one conversation whose tokens no other has. Nothing else runs meanwhile, so the decode server's metrics are of it alone."""
    prompt, answer, more = sizes
    prefill, decode = pair
    text: list[int] = rng.integers(1, VOCABULARY, prompt).tolist()
    out = []
    for left in reversed(range(turns)):
        reply_of(prefill, rng.integers(1, VOCABULARY, SHORT).tolist(), 1, timeout=600.0)
        before = total(decode, FIRST_TOKEN)
        tokens = answer if left else min(answer, SHORT)
        turn = talk.turn(text, tokens, timeout=600.0)
        first = turn.prefill.seconds + total(decode, FIRST_TOKEN) - before
        expected = reply_of(plain, text, tokens, timeout=600.0).tokens if plain else None
        cached = reply_of(prefill, text, 1, timeout=600.0).seconds
        out.append(Timed(len(text), turn, first, cached, expected))
        text = text + turn.decode.tokens + rng.integers(1, VOCABULARY, more).tolist()
    return out


def faults(conversations: Sequence[Sequence[Timed]], loads: bool) -> list[str]:
    """Return at which turns tokens are wrong, or, if prefill ``loads``, it has computed more than what is new and a block."""
    out = []
    for number, turns in enumerate(conversations, 1):
        had = 0
        for turn, at in enumerate(turns, 1):
            where, new = f"conversation {number}, turn {turn}", at.prompt_tokens - had
            if at.turn.decode.tokens != at.expected:
                out.append(f"{where}: the tokens are not those of the plain server")
            if loads and at.turn.prefill.computed > new + BLOCK:
                out.append(f"{where}: prefill has computed {at.turn.prefill.computed} tokens, of which {new} are new")
            had = at.prompt_tokens + len(at.turn.decode.tokens)
    return out


def summary(conversations: Sequence[Sequence[Timed]]) -> list[dict[str, Any]]:
    """Return medians by turn: the tokens of the prompt, those that the prefill server has computed, and milliseconds."""
    return [
        {
            "turn": number + 1,
            "prompt_tokens": at[0].prompt_tokens,
            "prefill_computed": int(statistics.median(t.turn.prefill.computed for t in at)),
            "prefill_ms": round(1e3 * statistics.median(t.turn.prefill.seconds for t in at), 1),
            "cached_ms": round(1e3 * statistics.median(t.cached_s for t in at), 1),
            "first_token_ms": round(1e3 * statistics.median(t.first_s for t in at), 1),
        }
        for number, at in enumerate(zip(*conversations, strict=True))
    ]


def by_turn(report: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return the report as a table: a row for each turn, for each way tokens that were computed and the time to the first token."""
    ways = list(report)
    rows = [["turn", "prompt", *(f"{way}: computed, ms" for way in ways)]]
    for number, turn in enumerate(report[ways[0]]):
        cells = [f"{report[way][number]['prefill_computed']}, {report[way][number]['first_token_ms']}" for way in ways]
        rows.append([str(turn["turn"]), str(turn["prompt_tokens"]), *cells])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
