"""Which offers answer one HTTP request: the prompts of a batched completion, of which vLLM relays the params of the first only.

A decode engine finds the offers of the others by their content. If its front end rejects the batch, it knows no content. So the
params of the first prompt name what the others offer.
"""

from __future__ import annotations

from collections import defaultdict

from kvxfer_vllm.ids import ExternalId

__all__ = ["Batches"]


class Batches:
    """The batches whose prompts are being computed. One thread."""

    def __init__(self) -> None:
        self._by_id: defaultdict[str, list[dict[int, bytes]]] = defaultdict(list)  # by external id: digests by position
        self._of: dict[str, tuple[str, dict[int, bytes]]] = {}  # by request

    def arrived(self, request: str, external: ExternalId, digest: bytes) -> None:
        """Record a request that offers: the first of its position in its batch, or else of another batch with the same id."""
        known = self._by_id[external.base]
        batch = next((batch for batch in known if batch.get(external.prompt, digest) == digest), None)
        if batch is None:
            known.append(batch := {})
        batch[external.prompt] = digest
        self._of[request] = external.base, batch

    def others(self, request: str) -> dict[int, bytes]:
        """Return the digests of the other prompts of a batch by position; none if several batches have its id, so that it is unclear."""
        base, batch = self._of.get(request, ("", {}))
        if len(self._by_id.get(base, ())) != 1:
            return {}
        return {position: digest for position, digest in batch.items() if position}

    def finished(self, request: str) -> None:
        """Record that a request is over."""
        base, batch = self._of.pop(request, ("", None))
        if batch is not None and not any(other is batch for _, other in self._of.values()):
            self._by_id[base] = [other for other in self._by_id[base] if other is not batch]
            if not self._by_id[base]:
                del self._by_id[base]

    def __len__(self) -> int:
        """Return how many requests are remembered."""
        return len(self._of)
