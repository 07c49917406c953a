"""What pairs of SGLang servers are compared by: tokens, first tokens, throughput and aborts, pair by pair in turns."""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from kvxfer.cli.terminal import Say, silent
from kvxfer_bench.sglang.asking import abort, ask_pair, ask_streaming, generate, generated, sampling
from kvxfer_bench.sglang.servers import SglangPair
from kvxfer_vllm.demo.servers import Server, ServerError, await_ready

START_S, ABORT_S = 600.0, 60.0
LONG = 200
"""Tokens that a request is to generate which is aborted."""

Tell = Callable[[Mapping[str, Any]], None]


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


def made_up(seed: int | str, tokens: int, vocab: int = 256) -> list[int]:
    """Return a prompt of random tokens."""
    chosen = random.Random(seed)
    return [chosen.randrange(vocab) for _ in range(tokens)]


def expect(plain: Server, prompts: Sequence[list[int]], tokens: int) -> list[Expectation]:
    """Return what a plain server generates behind some prompts.

    Raises:
        ServerError: It fails.
    """
    found = []
    for ids in prompts:
        answer = generate(plain, sampling(ids, tokens, return_logprob=True, top_logprobs_num=2))
        best = [sorted((one[0] for one in top), reverse=True) for top in answer["meta_info"]["output_top_logprobs"]]
        found.append(Expectation(ids, generated(answer), [first - second for first, second, *_ in best]))
    return found


class SglangTurns:
    """Measures pairs by name, in turns. A pair of which a server fails is left out from then on, which ``failed`` says.

    Args:
        pairs: The pairs.
        tell: Called with each result.
        say: Called with what is being done.
    """

    def __init__(self, pairs: Mapping[str, SglangPair], tell: Tell, say: Say = silent) -> None:
        self._pairs, self._tell, self._say = dict(pairs), tell, say
        self._threads = ThreadPoolExecutor(256)
        self.failed = False

    def ready(self) -> None:
        """Wait until all servers answer."""
        self._each("starting", lambda name, pair: await_ready([pair.prefill, pair.decode], START_S))

    def tokens(self, expectations: Sequence[Expectation], tie: float) -> None:
        """Tell how many answers are those of a plain server: one by one, and all at once."""

        def one(name: str, pair: SglangPair) -> None:
            def verdicts(answers: Sequence[list[int]]) -> dict[str, int]:
                return dict(Counter(e.verdict(tokens, tie) for e, tokens in zip(expectations, answers, strict=True)))

            each = [ask_pair(self._threads, pair, e.ids, len(e.tokens)).tokens() for e in expectations]
            asked = [ask_pair(self._threads, pair, e.ids, len(e.tokens)) for e in expectations]
            together = verdicts([one.tokens() for one in asked])
            self._tell({"backend": name, "one_by_one": verdicts(each), "at_once": together})

        self._each("tokens", one)

    def load(self, at_once: int, prompt: int, tokens: int, rounds: int) -> None:
        """Tell first tokens and throughput with several requests at once; one more round warms up."""
        first: dict[str, list[float]] = {name: [] for name in self._pairs}
        rates: dict[str, list[float]] = {name: [] for name in self._pairs}
        for number in range(rounds + 1):

            def one(name: str, pair: SglangPair, number: int = number) -> None:
                prompts = [made_up(1_000_003 * number + n, prompt) for n in range(at_once)]
                begun = time.monotonic()
                with ThreadPoolExecutor(at_once) as readers:
                    streams = list(readers.map(lambda ids: ask_streaming(self._threads, pair, ids, tokens), prompts))
                took = time.monotonic() - begun
                if number:
                    first[name] += [one.first_s for one in streams]
                    rates[name].append(sum(one.tokens for one in streams) / took)

            self._each(f"{at_once} at once, round {number} of {rounds}", one)
        for name in self._pairs:
            self._tell(
                {
                    "backend": name,
                    "at_once": at_once,
                    "prompt": prompt,
                    "first_ms": round(1e3 * statistics.median(first[name]), 1),
                    "first_ms_most": round(1e3 * max(first[name]), 1),
                    "tokens_per_s": round(statistics.median(rates[name]), 1),
                }
            )

    def aborts(self, prompt: int) -> None:
        """Tell how long both servers take to end a request that one of them aborts while prefill computes it.

        Two other requests with as long a prompt tell how long prefill takes; the abort comes after half of that (``after_s``). If
        the request was over all the same, nothing is told of that abort.

        Args:
            prompt: Tokens of the prompts.
        """

        def one(name: str, pair: SglangPair) -> None:
            after = min(self._prefill_s(pair, made_up(f"{name} whole {n}", prompt)) for n in range(2)) / 2
            took = {}
            for who, server, end in (("prefill", pair.prefill, "p"), ("decode", pair.decode, "d")):
                asked = ask_pair(self._threads, pair, made_up(f"{name} {who}", prompt), LONG, ABORT_S)
                time.sleep(after)
                abort(server, f"{asked.rid}-{end}")
                begun = time.monotonic()
                answers = {"prefill": asked.prefill, "decode": asked.decode}
                wait(answers.values())  # with tokens, or an error
                if _aborted(answers[who]):
                    took[f"aborted_by_{who}_s"] = round(time.monotonic() - begun, 2)
            self._tell({"backend": name, "prompt": prompt, "after_s": round(after, 3), **took})

        self._each("aborts", one)

    def _prefill_s(self, pair: SglangPair, ids: list[int]) -> float:
        """Return the seconds until the prefill server has answered a request."""
        begun = time.monotonic()
        asked = ask_pair(self._threads, pair, ids, 1, ABORT_S)
        generated(asked.prefill.result())
        took = time.monotonic() - begun
        asked.tokens()
        return took

    def _each(self, what: str, do: Callable[[str, SglangPair], None]) -> None:
        for name, pair in list(self._pairs.items()):
            self._say(f"{what}: {name}")
            try:
                do(name, pair)
            except (ServerError, OSError) as error:
                self.failed = True
                del self._pairs[name]
                self._tell({"backend": name, "error": f"{what}: {error}"})


def _aborted(answer: Future[Any]) -> bool:
    """Whether a server's answer says that the request was aborted, or is an error."""
    try:
        generated(answer.result())
    except ServerError:
        return True
    return False
