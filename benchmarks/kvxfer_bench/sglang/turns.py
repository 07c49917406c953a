"""What pairs of SGLang servers are compared by: tokens, first tokens and throughput, pair by pair in turns."""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvxfer.cli.terminal import Say
from kvxfer_bench.servers import PairTurns, Tell
from kvxfer_bench.sglang.asking import GENERATE, ask_pair, ask_streaming, generated, sampling
from kvxfer_bench.sglang.servers import SglangPair
from kvxfer_vllm.demo.servers import Server


@dataclass(frozen=True)
class Expectation:
    """What a plain server generates behind a prompt, and by how much each token was the best.

    Attributes:
        ids: The prompt.
        tokens: The tokens.
        margins: The difference between the log probabilities of the best token and the next one.
    """

    ids: list[int]
    tokens: list[int]
    margins: list[float]

    def verdict(self, tokens: Sequence[int], tie: float) -> str:
        """Return ``same``, ``tied`` or ``different``; a tie is where the first other token was nearly as good.

        Args:
            tokens: Those of other servers.
            tie: The margin below which rounding may decide either way.
        """
        for n, (own, other) in enumerate(zip(self.tokens, tokens, strict=False)):
            if own != other:
                return "tied" if self.margins[n] <= tie else "different"
        return "same" if len(tokens) == len(self.tokens) else "different"


def made_up(seed: int | str, tokens: int) -> list[int]:
    """Return a prompt of random tokens."""
    chosen = random.Random(seed)
    return [chosen.randrange(256) for _ in range(tokens)]


def expect(plain: Server, prompts: Sequence[list[int]], tokens: int) -> list[Expectation]:
    """Return what a plain server generates behind some prompts.

    Raises:
        ServerError: It fails.
    """
    found = []
    for ids in prompts:
        answer = plain.post(GENERATE, sampling(ids, tokens, return_logprob=True, top_logprobs_num=2), 120.0)
        best = [sorted((one[0] for one in top), reverse=True) for top in answer["meta_info"]["output_top_logprobs"]]
        found.append(Expectation(ids, generated(answer), [first - second for first, second, *_ in best]))
    return found


class SglangTurns(PairTurns[SglangPair]):
    """Measures pairs of SGLang servers by name, in turns."""

    def __init__(self, pairs: Mapping[str, SglangPair], tell: Tell, say: Say) -> None:
        super().__init__(pairs, tell, say)
        self._threads = ThreadPoolExecutor(256)

    def tokens(self, expectations: Sequence[Expectation], tie: float) -> None:
        """Tell how many answers are those of a plain server: one by one, and all at once."""

        def one(name: str, pair: SglangPair) -> None:
            def verdicts(answers: Sequence[list[int]]) -> dict[str, int]:
                return dict(Counter(e.verdict(tokens, tie) for e, tokens in zip(expectations, answers, strict=True)))

            each = [ask_pair(self._threads, pair, e.ids, len(e.tokens)).tokens() for e in expectations]
            asked = [ask_pair(self._threads, pair, e.ids, len(e.tokens)) for e in expectations]
            together = verdicts([one.tokens() for one in asked])
            self.tell({"backend": name, "one_by_one": verdicts(each), "at_once": together})

        self.each("tokens", one)

    def load(self, at_once: int, prompt: int, tokens: int, rounds: int) -> None:
        """Tell first tokens and throughput with several requests at once; one more round warms up."""
        first: dict[str, list[float]] = {name: [] for name in self.pairs}
        rates: dict[str, list[float]] = {name: [] for name in self.pairs}

        def one(name: str, pair: SglangPair, number: int) -> None:
            prompts = [made_up(f"{name} {number} {n}", prompt) for n in range(at_once)]
            begun = time.monotonic()
            with ThreadPoolExecutor(at_once) as readers:
                streams = list(readers.map(lambda ids: ask_streaming(self._threads, pair, ids, tokens), prompts))
            took = time.monotonic() - begun
            if number:
                first[name] += [first_s for first_s, _ in streams]
                rates[name].append(sum(count for _, count in streams) / took)

        self.rounds(f"{at_once} at once", rounds, one)
        for name in self.pairs:
            self.tell(
                {
                    "backend": name,
                    "at_once": at_once,
                    "prompt": prompt,
                    "first_ms": round(1e3 * statistics.median(first[name]), 1),
                    "first_ms_most": round(1e3 * max(first[name]), 1),
                    "tokens_per_s": round(statistics.median(rates[name]), 1),
                }
            )
