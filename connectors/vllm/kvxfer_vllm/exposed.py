"""What of a transfer a user waits for when both engines have the request at once: the part behind the producer's last token.

The link is throttled, so that the whole transfer takes a known time. Once the producer computes the prompt in many chunks, and each is
moved while the next is computed; once in a single one, behind which all of it has to be moved.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from kvxfer.identity import TransferId
from kvxfer_vllm.played import engines
from kvxfer_vllm.played_prefill import MODEL, Prompt

__all__ = ["ALLOWANCE", "exposure"]

TOKENS, STEP_S = 1024, 0.002
ALLOWANCE = 0.05
"""Of the transfer in a single chunk, how much more than the last chunk may be exposed."""


def exposure(chunks: int, rounds: int, transfer_ms: float, backend: str) -> dict[str, Any]:
    """Measure how long transfers go on after the producer's last token.

    Args:
        chunks: Of each prompt.
        rounds: Prompts of each kind.
        transfer_ms: What the link needs for a prompt, in ms. Its prefill takes twice as long.
        backend: The back end behind the throttle; its consumer reads.

    Returns:
        ``whole_ms`` and ``chunked_ms`` of each prompt, the ``ratio`` of their medians, and the ``goal`` of that.
    """
    nbytes = MODEL.layers * MODEL.page * TOKENS // MODEL.block_tokens
    options = {"inner": backend, "bytes_per_s": 1000 * nbytes / transfer_ms}
    settings = {"backend": "kvxfer.testing.faults:Faulty", "backend_options": options, "step_budget": 0}
    exposed: dict[int, list[float]] = {1: [], chunks: []}
    with engines(settings, STEP_S, False) as (engine, producer):
        for i in range(2 * rounds + 1):
            many = 1 if i % 2 else chunks
            params = {
                "do_remote_prefill": True,
                "transfer_id": f"both{i}",
                "remote_host": producer.source.host,
                "remote_port": producer.source.port,
            }
            request = engine.request(f"load{i}", TOKENS, 1, params)
            name = TransferId.routed(f"both{i}")
            begun = time.monotonic()
            producer.begin(Prompt(name, engine.digest(request), TOKENS, many, 2 * transfer_ms / 1000))
            engine.add(request)
            engine.until(request.request_id)
            arrived = begun + engine.traces()[-1]["us"]["arrived"] / 1e6
            late = arrived - producer.last_token()
            if i:  # the first makes the link
                exposed[many].append(round(1000 * late, 1))
    whole, chunked = exposed[1], exposed[chunks]
    ratio = round(statistics.median(chunked) / statistics.median(whole), 3)
    return {"whole_ms": whole, "chunked_ms": chunked, "ratio": ratio, "goal": round(1 / chunks + ALLOWANCE, 3)}
