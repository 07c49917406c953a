"""Where a worker stands among its engine's ranks: which heads it has, and which tokens.

vLLM numbers the ranks of a pipeline stage by prefill context parallelism, then by tensor parallelism. Decode context parallelism
takes ranks that others made: those of tensor parallelism that follow each other, or, with prefill context parallelism, those of
the same tensor-parallel rank before those of the next. Such ranks take turns with the tokens of a block. Without it, each rank of
prefill context parallelism has all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from kvxfer.geometry import Rank, TokenTurns
from kvxfer_vllm.pages import takes_turns

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["Place", "rank_of", "replicated_ranks", "turn_takers"]


def turn_takers(config: VllmConfig) -> int:
    """Return how many ranks take turns with tokens."""
    return int(getattr(config.parallel_config, "decode_context_parallel_size", 1))


def replicated_ranks(config: VllmConfig) -> bool:
    """Return whether ranks of prefill context parallelism hold the same.

    vLLM then tells its scheduler side of one of them alone, because it numbers them alike; their first reports tell of all.
    """
    return int(getattr(config.parallel_config, "prefill_context_parallel_size", 1)) > 1 and turn_takers(config) == 1


def rank_of(config: VllmConfig, stage: int, prefill: int, tensor: int) -> Rank:
    """Return the rank of a worker, by its places in its pipeline and in prefill context and tensor parallelism."""
    return Rank(stage, prefill * config.parallel_config.tensor_parallel_size + tensor)


@dataclass(frozen=True)
class Place:
    """What follows from a worker's rank."""

    tensor: Rank  # tensor-parallel rank, as a rank of this engine
    size: int  # tensor-parallel size
    turn: int  # its number among those that take turns
    ranks: int  # how many these are
    span: int  # the tokens of a turn

    @classmethod
    def of(cls, config: VllmConfig, rank: Rank) -> Self:
        """Return the place of the rank that ``rank_of`` has returned."""
        parallel: Any = config.parallel_config
        size, ranks = int(parallel.tensor_parallel_size), turn_takers(config)
        prefill, tensor = divmod(rank.tp, size)
        across = int(getattr(parallel, "prefill_context_parallel_size", 1))
        turn = (tensor * across + prefill) % ranks
        return cls(Rank(rank.pp, tensor), size, turn, ranks, int(getattr(parallel, "cp_kv_cache_interleave_size", 1)))

    def turns(self, spec: Any) -> TokenTurns | None:
        """Return which tokens of such a cache this rank has; ``None`` for all."""
        return TokenTurns(self.turn, self.ranks, self.span) if self.ranks > 1 and takes_turns(spec) else None
