"""What a decode server says about the KV that it received: sums over its Prometheus metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kvxfer_vllm.demo.servers import Server


@dataclass(frozen=True)
class ReceivedKV:
    """Totals since a decode server started, or the difference of two such.

    ``tokens`` are prompt tokens whose KV came from outside, as vLLM itself counts them; ``failed`` are transfers that did not deliver.
    """

    tokens: int
    kv_bytes: int
    seconds: float
    failed: int

    def __sub__(self, earlier: ReceivedKV) -> ReceivedKV:
        return ReceivedKV(
            self.tokens - earlier.tokens,
            self.kv_bytes - earlier.kv_bytes,
            self.seconds - earlier.seconds,
            self.failed - earlier.failed,
        )


def received(server: Server) -> ReceivedKV:
    """Read the totals now.

    Raises:
        ServerError: The server does not export one of the metrics.
    """
    page = _families(server)
    return ReceivedKV(
        tokens=_loaded(page, server),
        kv_bytes=int(_total(page, server, "kvxfer_kv_bytes_total")),
        seconds=_total(page, server, "kvxfer_transfer_seconds_sum"),
        failed=int(_total(page, server, "kvxfer_transfers_total", lambda has: has["outcome"] != "delivered")),
    )


def loaded_tokens(server: Server) -> int:
    """Return of how many prompt tokens the KV came from outside, by whatever connector, as vLLM itself counts them.

    Raises:
        ServerError: The server does not export it.
    """
    return _loaded(_families(server), server)


def total(server: Server, name: str, counts: Callable[[dict[str, str]], bool] = lambda labels: True) -> float:
    """Return the sum of one metric over its labels, or over those that count.

    Raises:
        ServerError: The server does not export it.
    """
    return _total(_families(server), server, name, counts)


def _loaded(page: dict[str, list[Sample]], server: Server) -> int:
    by_source = "vllm:prompt_tokens_by_source_total"
    return int(_total(page, server, by_source, lambda has: has["source"] == "external_kv_transfer"))


def _families(server: Server) -> dict[str, list[Sample]]:
    return {family.name: family.samples for family in text_string_to_metric_families(server.metrics())}


def _total(
    page: dict[str, list[Sample]],
    server: Server,
    name: str,
    counts: Callable[[dict[str, str]], bool] = lambda labels: True,
) -> float:
    for family in (name, name.rpartition("_")[0]):
        if family in page:
            return sum(s.value for s in page[family] if s.name == name and counts(s.labels))
    raise server.error(f"exports no metric {name}; is its kvxfer-vllm of this version?")
