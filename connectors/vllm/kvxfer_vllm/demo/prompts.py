"""The demo's prompts, each of which goes to a plain server and then through prefill and decode, and the verdict on them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvxfer_vllm.demo.metrics import ReceivedKV, received
from kvxfer_vllm.demo.routing import complete, prefill_then_decode
from kvxfer_vllm.demo.servers import BLOCK, CHUNK, Cluster

OUTPUT_TOKENS = 32

_SQUARES = ", ".join(f"{n} squared is {n * n}" for n in range(1, 100))
_CUBES = ", ".join(f"{n} cubed is {n * n * n}" for n in range(1, 100))

# One token a character.
PROMPTS = {
    "below one block": "What is in a KV cache?",
    "two whole blocks": _CUBES[: 2 * BLOCK],
    "several chunks": _SQUARES[: 3 * CHUNK + 100],
    "the same again": _SQUARES[: 3 * CHUNK + 100],
    "another ending": _SQUARES[: 2 * CHUNK] + _CUBES[:200],
}


@dataclass(frozen=True)
class Comparison:
    """One prompt's tokens from prefill and decode, and the plain server's."""

    name: str
    prompt_tokens: int
    expected: list[int]
    tokens: list[int]
    received: ReceivedKV

    @property
    def identical(self) -> bool:
        return self.tokens == self.expected


def compare(cluster: Cluster, name: str, prompt: str) -> Comparison:
    """Send one prompt both ways. Nobody else may use the decode server meanwhile: its totals are compared.

    Raises:
        ServerError: a server failed the request.
    """
    expected = complete(cluster.plain, prompt, OUTPUT_TOKENS)
    before = received(cluster.decode)
    actual = prefill_then_decode(cluster.prefill, cluster.decode, prompt, OUTPUT_TOKENS)
    after = received(cluster.decode)
    return Comparison(name, actual.prompt_tokens, expected.tokens, actual.tokens, after - before)


def objections(outcomes: Iterable[Comparison]) -> list[str]:
    """Return why these outcomes do not prove that KV was moved correctly, or nothing if they do."""
    outcomes = list(outcomes)
    found = []
    for outcome in outcomes:
        if not outcome.identical:
            pairs = list(zip(outcome.tokens, outcome.expected, strict=True))
            first = next(i for i, (token, other) in enumerate(pairs) if token != other)
            found.append(f"{outcome.name!r}: output differs from the plain server's from token {first} on")
        if outcome.received.failed:
            found.append(f"{outcome.name!r}: {outcome.received.failed} transfer(s) failed")
    if not any(outcome.received.tokens and outcome.received.kv_bytes for outcome in outcomes):
        found.append("no KV was moved: the decode server computed all prompts itself")
    return found
