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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from kvxfer.cli.terminal import progress
from kvxfer_bench.options import Backend, Gpus, Json
from kvxfer_bench.servers import START_S, shape_of, starting
from kvxfer_bench.table import tables
from kvxfer_bench.verdict import mixed_rounds
from kvxfer_bench.vllm.pairs import ROLES
from kvxfer_vllm.demo.metrics import total
from kvxfer_vllm.demo.model import SHAPES
from kvxfer_vllm.demo.routing import PREFILL_PARAMS, Generated, complete
from kvxfer_vllm.demo.servers import BLOCK, Server, await_ready, connector, free_port

FLAGS = ("--enable-prompt-tokens-details",)
"""Flags of servers that tell how many tokens of a prompt they had not to compute."""

RECOMPUTE, LOAD, NIXL = "recompute", "load", "nixl"
"""The three ways; the first two share their servers."""
MORE = 30
"""Tokens that each further turn adds to the history."""
FIRST_TOKEN = "vllm:time_to_first_token_seconds_sum"
SHORT = 16
"""Tokens at most of an answer that no turn continues."""
VOCABULARY = 200
"""Prompts are made of the tokens from 1 up to this one, which every model here has."""


Params = Mapping[str, Any]


def _nixl(told: Params) -> dict[str, Any]:
    """Pass on what the decode server has answered, with the host of its HTTP server, as vLLM's example router does."""
    return {**told, "do_remote_decode": True, "do_remote_prefill": False, "remote_host": "localhost"}


def _source(told: Params) -> dict[str, Any]:
    """Name the decode server as llm-d does, by the key of vLLM's peer-to-peer tier."""
    where = {key: told[key] for key in ("remote_host", "remote_port")}
    return {**PREFILL_PARAMS, "remote_kv_source": {"kv_request_id": str(told["remote_request_id"]), **where}}


def _list(told: Params) -> dict[str, Any]:
    """Name it by kvxfer's own key, which may name several."""
    return {**PREFILL_PARAMS, "kvxfer_sources": [told["kvxfer_address"]]}


SCHEMAS: dict[str, Callable[[Params], dict[str, Any]]] = {
    "nixl": _nixl,
    "remote_kv_source": _source,
    "kvxfer_sources": _list,
}
"""By name: the params that a router makes for the prefill server out of the decode server's last answer."""


class PlayedTurn(NamedTuple):
    """What the two servers have said in one turn."""

    prefill: Generated
    decode: Generated


class Conversation:
    """One conversation through a prefill and a decode server.

    Args:
        schema: How the router tells the prefill server where the last turn's KV is (``SCHEMAS``); None: it does not.
    """

    def __init__(self, prefill: Server, decode: Server, schema: str | None) -> None:
        self._prefill, self._decode, self._schema = prefill, decode, schema
        self.told: dict[str, Any] | None = None  # what the decode server answered last

    def turn(self, prompt: Sequence[int], tokens: int, timeout: float = 60.0) -> PlayedTurn:
        """Have the next prompt, which is the whole history, answered with ``tokens`` tokens.

        Raises:
            ServerError: A server failed its part.
        """
        to_p = PREFILL_PARAMS if self._schema is None or self.told is None else SCHEMAS[self._schema](self.told)
        first = complete(self._prefill, prompt, 1, to_p, timeout)
        if not first.kv_transfer_params:
            raise self._prefill.error(f"offered no KV cache for a prompt of {len(prompt)} tokens")
        answer = complete(self._decode, prompt, tokens, first.kv_transfer_params, timeout)
        self.told = answer.kv_transfer_params
        return PlayedTurn(first, answer)


def conversation(
    turns: Annotated[int, typer.Option(min=2, help="Turns of a conversation.")] = 5,
    conversations: Annotated[int, typer.Option(min=1, help="Conversations, one after the other.")] = 3,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the first prompt.")] = 200,
    answer: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 200,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Also compare each answer with that of a plain server. Exit with 1 if one differs, or if prefill computes more at a turn "
            f"than what is new and a block of {BLOCK} tokens.",
        ),
    ] = False,
    schema: Annotated[
        str, typer.Option(help="How the router says where the last turn's KV is: " + ", ".join(SCHEMAS))
    ] = "nixl",
    backend: Backend = "tcp",
    model: Annotated[str, typer.Option(help="A shape of a model: " + ", ".join(SHAPES))] = "tiny",
    gpus: Gpus = "",
    nixl: Annotated[bool, typer.Option(help="Measure vLLM's NixlConnector in its bidirectional mode, too.")] = False,
    as_json: Json = False,
) -> None:
    """Time turns of conversations on real servers: the KV of earlier answers loaded from the decode server, or computed again."""
    if schema not in SCHEMAS:
        raise typer.BadParameter(f"{schema!r} is none of {', '.join(SCHEMAS)}", param_hint="--schema")
    say, shape = progress(), shape_of(model)
    usual = [*FLAGS, "--dtype", shape.dtype, "--max-model-len", str(min(shape.max_len, 32768))]
    with starting(model, usual, gpus) as starter:

        def pair(name: str, transfer: Mapping[str, Any]) -> tuple[Server, Server]:
            prefill, decode = (
                starter.start(f"{name}-{role}", role, transfer, env={"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())})
                for role in ROLES
            )
            return prefill, decode

        ours = pair("kvxfer", connector("kv_both", {"backend": backend, "ask": "always", "trust_sources": True}))
        ways = {RECOMPUTE: (*ours, None), LOAD: (*ours, schema)}
        plain = starter.start("plain", "decode") if check else None
        if nixl:
            extra = {"bidirectional_kv_xfer": True, "kv_recompute_threshold": 16}
            stock = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
            ways[NIXL] = (*pair(NIXL, stock), "nixl")
        await_ready(starter.begun, START_S, lambda server: say(f"{server.name} is ready"))
        found: dict[str, list[list[Timed]]] = {way: [] for way in ways}
        for number, way in mixed_rounds("conversation", ways, conversations, say):
            prefill, decode, told = ways[way]
            rng = np.random.default_rng([number, list(ways).index(way)])
            sizes = (prompt, answer if number else min(answer, prompt))
            one = _converse(Conversation(prefill, decode, told), (prefill, decode), rng, sizes, turns, plain)
            if number:
                found[way].append(one)
    report = {way: summary(found[way]) for way in ways}
    what = {"prompt": prompt, "answer": answer, "more": MORE, "backend": backend, "schema": schema}
    wrong = [f"{way}, {fault}" for way in ways if check for fault in faults(found[way], loads=way == LOAD)]
    judged = {"turns_checked": len(ways) * conversations * turns, "wrong": wrong} if check else {}
    typer.echo(json.dumps({**what, **report, **judged}, indent=1))
    if not as_json:
        typer.echo(tables({"way": way, **turn} for way, turns_of in report.items() for turn in turns_of))
    if wrong:
        raise typer.Exit(1)


@dataclass(frozen=True)
class Timed:
    """One turn.

    Attributes:
        prompt_tokens: The length of its prompt.
        prefill, decode: What the servers have said.
        first_s: The seconds from the client's request to its first token.
        cached_s: The seconds that the prefill server takes for the same prompt once it has all of its KV.
        expected: The answer of a plain server, if there is one.
    """

    prompt_tokens: int
    prefill: Generated
    decode: Generated
    first_s: float
    cached_s: float
    expected: list[int] | None = None


def _converse(
    talk: Conversation,
    pair: tuple[Server, Server],
    rng: np.random.Generator,
    sizes: tuple[int, int],
    turns: int,
    plain: Server | None,
) -> list[Timed]:
    """Have one conversation whose tokens no other has. Nothing else runs meanwhile, so the decode server's metrics are of it alone."""
    prompt, answer = sizes
    prefill, decode = pair
    text: list[int] = rng.integers(1, VOCABULARY, prompt).tolist()
    out = []
    for left in reversed(range(turns)):
        complete(prefill, rng.integers(1, VOCABULARY, SHORT).tolist(), 1, timeout=600.0)
        before = total(decode, FIRST_TOKEN)
        tokens = answer if left else min(answer, SHORT)
        there, here = talk.turn(text, tokens, timeout=600.0)
        first = there.seconds + total(decode, FIRST_TOKEN) - before
        expected = complete(plain, text, tokens, timeout=600.0).tokens if plain else None
        cached = complete(prefill, text, 1, timeout=600.0).seconds
        out.append(Timed(len(text), there, here, first, cached, expected))
        text = text + here.tokens + rng.integers(1, VOCABULARY, MORE).tolist()
    return out


def faults(conversations: Sequence[Sequence[Timed]], loads: bool) -> list[str]:
    """Return at which turns tokens are wrong, or, if prefill ``loads``, it has computed more than what is new and a block."""
    out = []
    for number, turns in enumerate(conversations, 1):
        had = 0
        for turn, at in enumerate(turns, 1):
            where, new = f"conversation {number}, turn {turn}", at.prompt_tokens - had
            if at.decode.tokens != at.expected:
                out.append(f"{where}: the tokens are not those of the plain server")
            if loads and at.prefill.computed > new + BLOCK:
                out.append(f"{where}: prefill has computed {at.prefill.computed} tokens, of which {new} are new")
            had = at.prompt_tokens + len(at.decode.tokens)
    return out


def summary(conversations: Sequence[Sequence[Timed]]) -> list[dict[str, Any]]:
    """Return medians by turn: the tokens of the prompt, those that the prefill server has computed, and milliseconds."""
    return [
        {
            "turn": number + 1,
            "prompt_tokens": at[0].prompt_tokens,
            "prefill_computed": int(statistics.median(t.prefill.computed for t in at)),
            "prefill_ms": round(1e3 * statistics.median(t.prefill.seconds for t in at), 1),
            "cached_ms": round(1e3 * statistics.median(t.cached_s for t in at), 1),
            "first_token_ms": round(1e3 * statistics.median(t.first_s for t in at), 1),
        }
        for number, at in enumerate(zip(*conversations, strict=True))
    ]
