"""Which requests one HTTP answer tells of: the samples of a prompt, and the prompts of a batched completion.

vLLM gives them request ids of their own and relays the params of one. A decode engine finds the offers of the other prompts by their
content. If its front end rejects the batch, it knows no content, and gives up all that the answer tells of.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from kvxfer_vllm.ids import ExternalId
from kvxfer_vllm.requests import HttpBatch, RequestFacts

__all__ = ["Batches", "spread_over_ranks"]


class Batches:
    """The HTTP requests of which something is computed or held here. One thread."""

    def __init__(self) -> None:
        self._by_id: defaultdict[str, list[HttpBatch]] = defaultdict(list)

    def answer(self, facts: RequestFacts, external: ExternalId, arrived: float) -> str:
        """Take in a request that offers, and return the name of the answer that will tell of it.

        Clients send one id for several requests. vLLM's front end notes one time of arrival for all prompts of an HTTP request,
        which tells them apart. Where it is unclear all the same to which of them a prompt belongs, it has an answer of its own.
        """
        request = facts.name
        prompt = request if external.child is None else request.partition("_")[2]
        known = self._by_id[external.base]
        fitting = [batch for batch in known if batch.prompts.get(external.prompt, prompt) == prompt]
        fitting = [batch for batch in fitting if batch.arrived == arrived] or fitting
        if len(fitting) == 1:
            (batch,) = fitting
        else:
            known.append(batch := HttpBatch(prompt, external.base, arrived))
        batch.prompts[external.prompt] = prompt
        batch.requests.add(request)
        batch.running.add(request)
        facts.batch = batch
        return batch.answer

    def ended(self, facts: RequestFacts) -> str | None:
        """Record that a request has ended; return the name of its answer if all others that this tells of had ended before it."""
        batch = facts.batch
        if batch is None:
            return None
        batch.running.discard(facts.name)
        return None if batch.running or len(batch.requests) == 1 else batch.answer

    def over(self, facts: RequestFacts) -> None:
        """Record that nothing is computed or held for a request any more."""
        batch, facts.batch = facts.batch, None
        if batch is None:
            return
        batch.requests.remove(facts.name)
        if not batch.requests:
            self._by_id[batch.base].remove(batch)
            if not self._by_id[batch.base]:
                del self._by_id[batch.base]

    def __len__(self) -> int:
        """Return of how many HTTP requests something is computed or held."""
        return sum(map(len, self._by_id.values()))


def spread_over_ranks(engine: str, parallel: Any) -> bool:
    """Return whether vLLM's front end may give the requests of one HTTP request to several engines: its data-parallel ranks.

    It does not if something outside chooses the rank, each of which then has a front end of its own. vLLM lets a rank of a dense
    model believe that it is alone, but writes its number behind the engine's name.
    """
    several = parallel.data_parallel_size > 1 or engine.endswith(f"_dp{getattr(parallel, 'data_parallel_index', 0)}")
    return several and not getattr(parallel, "data_parallel_external_lb", False)
