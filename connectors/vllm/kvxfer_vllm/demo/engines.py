"""``kvxfer bench engines``: what a user waits for at real vLLM servers of a real model's size, by back end.

A prefill and a decode server stand on the GPUs that are named, with weights that vLLM makes up. In each round kinds of
request take turns: of two tokens, which is the least that this server needs for a first token; of a prompt that is
computed where it is decoded; the same again, now cached there, which is the least for this prompt; of one whose KV comes
from the prefill server; and, unless the connector cannot, of one that is sent to both servers at once. A server without a
connector beside them shows what a connector costs while nothing moves.
"""

from __future__ import annotations

import json
import re
import statistics
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from kvxfer.errors import ConfigError
from kvxfer_vllm.demo.metrics import loaded_tokens
from kvxfer_vllm.demo.model import SHAPES, Shape, write_shape
from kvxfer_vllm.demo.routing import PREFILL_PARAMS, complete
from kvxfer_vllm.demo.servers import Server, ServerError, await_ready, connector, ended_by_sigterm, free_port
from kvxfer_vllm.demo.streams import busy, stream

STOCK = "NixlConnector"
"""The connector of vLLM's own that is measured beside kvxfer."""
START_S = 400.0
SETTLE_S = 0.05
STEPS = 96
"""Tokens by which a decode step is timed."""
OTHERS_TOKENS = 1024
"""Tokens that each of the others decodes before another takes its place."""
CASES = ["1024", "8192", "32768", "1024x16"]

Prompt = list[int]


@dataclass(frozen=True)
class PromptCase:
    """What is measured: ``at_once`` prompts of ``tokens`` tokens."""

    tokens: int
    at_once: int

    @classmethod
    def parse(cls, text: str) -> PromptCase:
        """Read ``1024``, or ``1024x16`` for sixteen at once.

        Raises:
            ConfigError: It is neither.
        """
        match = re.fullmatch(r"(\d+)(?:x(\d+))?", text)
        if match is None:
            raise ConfigError(f"--case {text!r}: a number of tokens, as 1024, or with how many at once, as 1024x16")
        case = cls(int(match[1]), int(match[2] or 1))
        if case.tokens < 16 or case.at_once < 1:
            raise ConfigError(f"--case {text!r}: at least 16 tokens, and at least one at once")
        return case


@dataclass(frozen=True)
class ServerPair:
    """Two servers that run, and one without a connector or None.

    Attributes:
        address: Where a router that sends to both at once says the prefill server is, or None if the connector knows no
            such requests.
    """

    prefill: Server
    decode: Server
    plain: Server | None
    address: tuple[str, int] | None


class Prompts:
    """Prompts of token ids that no server has seen. Any number of tokens; one thread."""

    def __init__(self, vocabulary: int) -> None:
        self._rng = np.random.default_rng(time.time_ns())
        self._vocabulary = vocabulary

    def of(self, tokens: int) -> Prompt:
        return [int(token) for token in self._rng.integers(1, self._vocabulary, tokens)]


def _first_tokens(server: Server, prompts: Sequence[Prompt], params: Sequence[Mapping[str, Any] | None]) -> float:
    """Send all at once; return when the last of them had its first token, by ``time.perf_counter``."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return max(pool.map(lambda prompt, said: next(stream(server, prompt, 1, said)), prompts, params))


def _offers(server: Server, prompts: Sequence[Prompt]) -> list[dict[str, Any] | None]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: complete(server, prompt, 1, PREFILL_PARAMS).kv_transfer_params, prompts))


def first_tokens(pair: ServerPair, prompts: Prompts, case: PromptCase, rounds: int) -> dict[str, Any]:
    """Time the last first token of requests that are sent together, kind by kind.

    Args:
        pair: The servers.
        prompts: Where prompts come from.
        case: How many requests, and of what length.
        rounds: How many rounds count; one more warms up.

    Returns:
        Medians in milliseconds: ``least``, ``computed``, ``cached`` and ``loaded`` at the decode server; ``prefilled``, until
        the prefill server had answered; ``together``, from the dispatch to both servers to the decode server's first token,
        where one after the other takes ``prefilled`` and ``loaded``. ``plain_computed`` and ``prefill_computed`` compare a
        first token computed without a connector and with one.
    """
    taken: dict[str, list[float]] = {}
    tokens, at_once = case.tokens, case.at_once
    none: list[Mapping[str, Any] | None] = [None] * at_once
    before = loaded_tokens(pair.decode)

    def timed(
        kind: str, server: Server, some: Sequence[Prompt], params: Sequence[Mapping[str, Any] | None] = none
    ) -> None:
        begin = time.perf_counter()
        taken.setdefault(kind, []).append(_first_tokens(server, some, params) - begin)
        time.sleep(SETTLE_S)

    def fresh(length: int = tokens) -> list[Prompt]:
        return [prompts.of(length) for _ in range(at_once)]

    for _ in range(rounds + 1):
        timed("least", pair.decode, fresh(2))
        timed("computed", pair.decode, again := fresh())
        timed("cached", pair.decode, again)
        if pair.plain is not None:
            timed("plain_computed", pair.plain, fresh())
            timed("prefill_computed", pair.prefill, fresh())
        some = fresh()
        begin = time.perf_counter()
        offers = _offers(pair.prefill, some)
        taken.setdefault("prefilled", []).append(time.perf_counter() - begin)
        timed("loaded", pair.decode, some, offers)
        if pair.address is not None:
            taken.setdefault("together", []).append(_together(pair, fresh()))
            time.sleep(SETTLE_S)
    found = {kind: statistics.median(seconds[1:]) for kind, seconds in taken.items()}
    loads = (rounds + 1) * at_once * (1 + (pair.address is not None))
    return {
        "tokens": tokens,
        "at_once": at_once,
        "rounds": rounds,
        **{f"{kind}_ms": round(1e3 * seconds, 2) for kind, seconds in found.items()},
        "loaded_over_least_ms": round(1e3 * (found["loaded"] - found["least"]), 2),
        "loaded_over_cached_ms": round(1e3 * (found["loaded"] - found["cached"]), 2),
        "loaded_to_least": round(found["loaded"] / found["least"], 3),
        "loaded_to_computed": round(found["loaded"] / found["computed"], 3),
        "tokens_loaded": round((loaded_tokens(pair.decode) - before) / (loads * tokens), 4),
    }


def _together(pair: ServerPair, some: Sequence[Prompt]) -> float:
    """Send each to both servers at the same time; return seconds until the last first token at the decode server."""
    assert pair.address is not None
    host, port = pair.address
    names = [uuid.uuid4().hex for _ in some]
    there = [{"do_remote_decode": True, "transfer_id": name} for name in names]
    here = [{"do_remote_prefill": True, "transfer_id": n, "remote_host": host, "remote_port": port} for n in names]
    begin = time.perf_counter()
    with ThreadPoolExecutor(1) as pool:
        prefill = pool.submit(_first_tokens, pair.prefill, some, there)
        end = _first_tokens(pair.decode, some, here)
        prefill.result()
    return end - begin


def decode_step(server: Server, others: int, prompts: Prompts) -> float:
    """Return the median milliseconds between the tokens of one of ``others`` requests that decode together."""
    with ThreadPoolExecutor(others) as pool:
        streams = [pool.submit(lambda p: list(stream(server, p, STEPS)), prompts.of(16)) for _ in range(others)]
        times = [future.result() for future in streams]
    return 1e3 * statistics.median(float(gap) for each in times for gap in np.diff(each[STEPS // 4 :]))


def idle_cost(pair: ServerPair, prompts: Prompts, rounds: int, others: int = 8) -> dict[str, Any]:
    """Time decode steps with a connector that moves nothing and without a connector, in turns."""
    if pair.plain is None:
        return {}
    servers = {"decode_step": pair.decode, "plain_decode_step": pair.plain}
    taken: dict[str, list[float]] = {name: [] for name in servers}
    for _ in range(rounds + 1):
        for name, server in servers.items():
            taken[name].append(decode_step(server, others, prompts))
    found = {f"{name}_ms": round(statistics.median(ms[1:]), 3) for name, ms in taken.items()}
    return {**found, "decode_step_to_plain": round(found["decode_step_ms"] / found["plain_decode_step_ms"], 3)}


def scatter(pair: ServerPair, prompts: Prompts, tokens: int) -> None:
    """Use both caches as hours of serving would, so that what comes next gets blocks from everywhere.

    Requests of mixed lengths, ``tokens`` tokens in all, end in another order than they began.
    """
    lengths = [int(n) for n in np.random.default_rng(0).integers(8, 200, 64)]
    for server in (pair.prefill, pair.decode):
        with ThreadPoolExecutor(16) as pool:
            for _ in range(1 + tokens // sum(lengths)):
                list(pool.map(lambda n: complete(server, prompts.of(n), 1 + n % 7, timeout=120), lengths))  # noqa: B023


@contextmanager
def servers(
    name: str, model: Path, logs: Path, gpus: Sequence[str], plain: bool, flags: Sequence[str]
) -> Iterator[ServerPair]:
    """Start a prefill and a decode server that move KV by back end ``name``, or by vLLM's own connector.

    Raises:
        ServerError: One of them ended or did not answer in time.
    """
    stock = name == STOCK
    port = free_port()
    with ExitStack() as stack:
        started = []
        for i, role in enumerate(("producer", "consumer", "plain") if plain else ("producer", "consumer")):
            gpu = gpus[min(i, 1) % len(gpus)] if gpus else None
            env = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
            transfer: dict[str, Any] | None = None
            if role != "plain" and stock:
                env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
                transfer = {"kv_connector": STOCK, "kv_role": "kv_both"}
            elif role != "plain":
                transfer = connector(f"kv_{role}", {"backend": name} | ({"port": port} if role == "producer" else {}))
            server = Server(f"{name}-{role}", model, logs, transfer, flags, env)
            stack.callback(server.stop)
            started.append(server)
        await_ready(started, START_S)
        address = None if stock else ("127.0.0.1", port)
        yield ServerPair(started[0], started[1], started[2] if plain else None, address)


def compare_engines(
    backends: Annotated[list[str], typer.Argument(help=f"Back ends, and {STOCK} for vLLM's own connector.")],
    model: Annotated[str, typer.Option(help=f"Shape of the model: {', '.join(SHAPES)}.")] = "llama-3-8b",
    gpus: Annotated[
        str, typer.Option(help="GPUs of the prefill and of the decode server, as 0,1 or 0; empty: CPUs.")
    ] = "0,1",
    case: Annotated[list[str], typer.Option(help="Tokens of a prompt, as 1024, or of 16 at once, as 1024x16.")] = CASES,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that count; one more warms up.")] = 7,
    others: Annotated[int, typer.Option(min=0, help="Requests that decode at the decode server all the while.")] = 0,
    plain: Annotated[bool, typer.Option(help="Also a server without a connector, on the decode server's GPU.")] = False,
    flags: Annotated[str, typer.Option(help="Further flags of the servers, separated by spaces.")] = "",
    keep_logs: Annotated[Path | None, typer.Option(help="Keep the servers' logs in this folder.")] = None,
) -> None:
    """Time first tokens at real vLLM servers of a real model's size, by back end; a JSON object a line."""
    if model not in SHAPES:
        raise ConfigError(f"unknown model {model!r}: the shapes are {', '.join(SHAPES)}")
    shape, cases = SHAPES[model], [PromptCase.parse(text) for text in case]
    prompts = Prompts(shape.vocab)
    on = [gpu.strip() for gpu in gpus.split(",") if gpu.strip()]
    failed = False
    with ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="kvxfer-engines-") as folder:
        where, logs = Path(folder) / "model", keep_logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        write_shape(where, shape)
        more = [*_flags(shape, cases, others, bool(on)), *flags.split()]
        for name in backends:
            said = {"backend": name, "model": model, "gpus": on, "others": others}
            try:
                with servers(name, where, logs, on, plain, more) as pair:
                    scatter(pair, prompts, _room(cases))
                    with busy(pair.decode, others, OTHERS_TOKENS) as decoding:
                        for one in cases:
                            typer.echo(json.dumps(said | first_tokens(pair, prompts, one, rounds)))
                            decoding.check()
                    if plain:
                        typer.echo(json.dumps(said | idle_cost(pair, prompts, rounds)))
            except ServerError as error:
                failed = True
                typer.echo(json.dumps(said | {"error": str(error)}))
    raise typer.Exit(int(failed))


def _room(cases: Sequence[PromptCase], others: int = 0) -> int:
    """Return how many tokens a server's cache must hold: those of the largest case, and what is released a moment later."""
    return max(case.tokens * case.at_once for case in cases) * 5 // 4 + 4096 + others * OTHERS_TOKENS


def _flags(shape: Shape, cases: Sequence[PromptCase], others: int, gpu: bool) -> list[str]:
    """Return what sets these servers apart from the demo's: weights that are made up, and a cache for the largest case."""
    longest, most = max(case.tokens for case in cases), max(case.at_once for case in cases)
    flags = ["--load-format", "dummy", "--dtype", shape.dtype, "--max-num-seqs", str(max(16, most) + others)]
    flags += ["--kv-cache-memory-bytes", str(_room(cases, others) * shape.token_bytes)]
    flags += ["--max-model-len", str(min(shape.max_len, max(longest, OTHERS_TOKENS) + 256))]
    if gpu:
        flags += ["--no-enforce-eager", "--block-size", "16", "--max-num-batched-tokens", "8192"]
    return flags
