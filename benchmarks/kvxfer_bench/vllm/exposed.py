"""How long a user waits for a transfer when both engines get the request at once: the time after the producer's last token.

The link is throttled, so that the whole transfer takes a known time. The producer computes a prompt in one of three ways:

- in many chunks, each of which is moved while the next is computed, with the prompt in many of its blocks or all in one;
- in a single chunk, in which each band of layers is moved while the next is computed;
- in a single chunk that is moved only once all of it has been computed.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from kvxfer.identity import TransferId
from kvxfer_bench.vllm.played import engines
from kvxfer_bench.vllm.played_prefill import BLOCK, MODEL, Prompt

TOKENS, STEP_S = 1024, 0.002
ALLOWANCE = 0.05
"""How much more than the last chunk may be exposed, as a share of the transfer in a single chunk."""
BANDED = 0.15
"""How much may be exposed where bands of layers are moved, as a share of the same; the last band is an eighth of it."""


def exposure(chunks: int, rounds: int, transfer_ms: float, backend: str) -> dict[str, Any]:
    """Measure how long transfers go on after the producer's last token, over a link that takes ``transfer_ms`` for a prompt.

    The prefill of a prompt takes twice as long. The back end is throttled; the consumer reads. There are ``rounds`` prompts of each
    kind.

    Returns:
        ``whole_ms``, ``chunked_ms``, ``banded_ms`` and ``one_block_ms``: the times of all prompts of that kind. ``ratio``,
        ``banded_ratio`` and ``one_block_ratio``: the medians of the last three, each divided by the median of ``whole_ms``. ``goal``
        (for ``ratio`` and ``one_block_ratio``) and ``banded_goal``: what these ratios are to be at most.
    """
    ways = {"whole": (1, False), "chunked": (chunks, False), "banded": (1, True)}
    exposed = _exposed(ways, rounds, transfer_ms, backend, BLOCK)
    exposed |= _exposed({"one_block": (chunks, False)}, rounds, transfer_ms, backend, TOKENS)
    medians = {way: statistics.median(ms) for way, ms in exposed.items()}
    found: dict[str, Any] = {f"{way}_ms": ms for way, ms in exposed.items()}
    found["ratio"], found["goal"] = round(medians["chunked"] / medians["whole"], 3), round(1 / chunks + ALLOWANCE, 3)
    found["banded_ratio"], found["banded_goal"] = round(medians["banded"] / medians["whole"], 3), BANDED
    found["one_block_ratio"] = round(medians["one_block"] / medians["whole"], 3)
    return found


def _exposed(
    ways: dict[str, tuple[int, bool]], rounds: int, transfer_ms: float, backend: str, block_tokens: int
) -> dict[str, list[float]]:
    """Return, for each way, the milliseconds after the last token of each prompt.

    ``ways``: how many chunks a prompt has, and whether bands of layers are moved.
    """
    nbytes = MODEL.layers * MODEL.page * TOKENS // MODEL.block_tokens
    options = {"inner": backend, "bytes_per_s": 1000 * nbytes / transfer_ms}
    settings = {"backend": "kvxfer.testing.faults:Faulty", "backend_options": options, "step_budget": 0}
    exposed: dict[str, list[float]] = {way: [] for way in ways}
    with engines(settings, STEP_S, False, block_tokens) as (engine, producer):
        for i, way in enumerate([next(iter(ways)), *rounds * list(ways)]):
            many, banded = ways[way]
            params = {
                "do_remote_prefill": True,
                "transfer_id": f"both{i}",
                "remote_host": producer.source.host,
                "remote_port": producer.source.port,
            }
            request = engine.request(f"load{i}", TOKENS, 1, params)
            name = TransferId.routed(f"both{i}")
            begun = time.monotonic()
            producer.begin(Prompt(name, engine.digest(request), TOKENS, many, 2 * transfer_ms / 1000, banded))
            engine.add(request)
            engine.until(request.request_id)
            arrived = begun + engine.traces()[-1]["us"]["arrived"] / 1e6
            late = arrived - producer.last_token()
            if i:  # the first one only makes the link and shows how slow it is
                exposed[way].append(round(1000 * late, 1))
    return exposed
