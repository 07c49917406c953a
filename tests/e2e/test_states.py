"""Recurrent states between engines of different tensor parallel sizes, on real servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from kvxfer_vllm.demo.metrics import received
from kvxfer_vllm.demo.routing import PREFILL_PARAMS, complete, prefill_then_decode
from kvxfer_vllm.demo.servers import BLOCK, Server, await_ready, connector, ended_together
from tests.conftest import require
from tests.e2e.conftest import PATIENT, first_of
from tests.e2e.forked import Forked, Referenced
from tests.e2e.hybrids import ALIGNED, write_delta_attention, write_delta_net, write_mamba_1
from tests.e2e.models import EXACT_POSITIONS, LATENTS, write_mamba, write_recurrent

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]


@dataclass(frozen=True)
class Kind:
    """What ``write`` writes, on servers with ``flags``; ``caches``: the tokens of a block in their prefix caches, 0 without one."""

    write: Callable[[Path], None]
    flags: tuple[str, ...] = ()
    caches: int = 0
    server: type[Server] = Forked


NOTHING_CACHED = ("--no-enable-prefix-caching",)
MODELS = {
    "short convolutions": Kind(write_recurrent, tuple(EXACT_POSITIONS), BLOCK),
    # With prefix caching vLLM 0.32 fails on CPUs here, without any connector; so it does for MLA beside states.
    "Mamba 2": Kind(write_mamba, NOTHING_CACHED),
    "Mamba 2 of two groups": Kind(partial(write_mamba, groups=2), NOTHING_CACHED),
    "gated delta nets": Kind(write_delta_net, (), ALIGNED, Referenced),
    "gated delta nets, nothing cached": Kind(write_delta_net, NOTHING_CACHED, 0, Referenced),
    "Mamba 1": Kind(write_mamba_1, (), ALIGNED, Referenced),
    "Mamba 1, nothing cached": Kind(write_mamba_1, NOTHING_CACHED, 0, Referenced),
    "Kimi's delta attention": Kind(write_delta_attention, (*NOTHING_CACHED, *LATENTS), 0, Referenced),
}
LETTERS = "".join(chr(97 + n * n % 26) for n in range(700))
PROMPTS = {"within a block": LETTERS[:20], "several blocks": LETTERS[:220], "many chunks": f"many chunks: {LETTERS}"}
WAYS = pytest.mark.parametrize(("of", "to"), [("TP 2", "TP 1"), ("TP 1", "TP 2")], ids=["2-to-1", "1-to-2"])


@pytest.fixture(scope="module", params=first_of(MODELS))
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """One of each size, which gives and takes, and a plain one."""
    require("vllm")
    folder = tmp_path_factory.mktemp("states")
    kind = MODELS[request.param]
    kind.write(folder / "model")
    with ended_together() as begun:

        def start(name: str, kv_transfer: dict[str, object] | None, flags: list[str]) -> Server:
            server = kind.server(name, folder / "model", folder, kv_transfer, [*flags, *kind.flags])
            begun.append(server)
            return server

        both = connector("kv_both", {**PATIENT, "trust_sources": True})
        started = {
            "plain": start("plain", None, []),
            "TP 1": start("tp-1", both, []),
            "TP 2": start("tp-2", both, ["--tensor-parallel-size", "2"]),
        }
        await_ready(started.values(), 300.0)
        yield started


@WAYS
@pytest.mark.parametrize("kind", PROMPTS)
def test_tokens_are_those_of_a_plain_server(servers: dict[str, Server], of: str, to: str, kind: str) -> None:
    """24 tokens past the prompt, so past the end of the block in which the state arrived for most."""
    prompt = f"{of} {to} {PROMPTS[kind]}"
    expected = complete(servers["plain"], prompt, 24)
    assert len(set(expected.tokens)) > 3, "output this dull would not show a spoilt state"
    before = received(servers[to])
    assert prefill_then_decode(servers[of], servers[to], prompt, 24).tokens == expected.tokens
    got = received(servers[to]) - before
    assert (got.tokens, got.failed) == (expected.prompt_tokens - 1, 0)


@WAYS
@pytest.mark.parametrize("n", [0, 1])
def test_a_state_at_the_end_of_a_block(servers: dict[str, Server], of: str, to: str, n: int) -> None:
    """The state is that before the last token of the prompt: with n of 1, at the end of a whole block."""
    prompt = f"{of} {to} {n} {LETTERS}"[: 3 * BLOCK + n]
    expected = complete(servers["plain"], prompt, 24)
    before = received(servers[to])
    assert prefill_then_decode(servers[of], servers[to], prompt, 24).tokens == expected.tokens
    assert (received(servers[to]) - before).tokens == expected.prompt_tokens - 1


@WAYS
@pytest.mark.parametrize("where", ["producer", "consumer", "both"])
def test_a_prefix_that_is_cached(
    servers: dict[str, Server], request: pytest.FixtureRequest, of: str, to: str, where: str
) -> None:
    """Where the consumer has it, only the rest comes; where nothing is cached, all comes."""
    prefix, rest = f"{where} {of} {to} {LETTERS[:300]}", "and then " + ", ".join(f"{n}" for n in range(40))
    for server in {"producer": [of], "consumer": [to], "both": [of, to]}[where]:
        complete(servers[server], prefix, 1)
    expected = complete(servers["plain"], prefix + rest, 24)
    before = received(servers[to])
    assert prefill_then_decode(servers[of], servers[to], prefix + rest, 24).tokens == expected.tokens
    got = received(servers[to]) - before
    assert not got.failed
    block = MODELS[request.node.callspec.params["servers"]].caches
    cached = len(prefix) // block * block if block and where != "producer" else 0
    assert got.tokens == expected.prompt_tokens - 1 - cached


@WAYS
def test_a_conversation_goes_on_from_a_state_that_was_loaded(servers: dict[str, Server], of: str, to: str) -> None:
    """The next turn finds the blocks of the first in the consumer's prefix cache, those that were loaded and its own."""
    first = f"turns {of} {to} {LETTERS[:250]}"
    prefill_then_decode(servers[of], servers[to], first, 40)
    turn = first + "and now for something else"
    assert complete(servers[to], turn, 24).tokens == complete(servers["plain"], turn, 24).tokens


@WAYS
@pytest.mark.parametrize(("n", "more"), [(70, 1), (3 * BLOCK + 1, 40), (200, 400)])
def test_a_prompt_that_goes_on_behind_the_producer_s(
    servers: dict[str, Server], of: str, to: str, n: int, more: int
) -> None:
    """The rest is computed from the state that was loaded, which most often stands within a block; so is a later turn."""
    text = f"on {of} {to} {n} {LETTERS}"
    params = complete(servers[of], text[:n], 1, PREFILL_PARAMS).kv_transfer_params
    prompt, before = text[: n + more], received(servers[to])
    assert complete(servers[to], prompt, 24, params).tokens == complete(servers["plain"], prompt, 24).tokens
    got = received(servers[to]) - before
    assert (got.tokens, got.failed) == (n - 1, 0)
    turn = prompt + "and now for something else"
    assert complete(servers[to], turn, 24).tokens == complete(servers["plain"], turn, 24).tokens
