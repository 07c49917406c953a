"""Clients of a fleet: mixed requests from the stock OpenAI client, whose tokens are compared with a plain server's."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import typer

from kvxfer.cli.terminal import Say, progress
from kvxfer_vllm.demo.routing import complete
from kvxfer_vllm.demo.servers import MODEL_NAME, Server, ServerError, await_ready, ended_by_sigterm

PROMPTS = 40
START_S, ANSWER_S = 300.0, 120.0


@dataclass(frozen=True)
class Wish:
    """A request that a client makes."""

    prompt: str
    tokens: int
    streams: bool


@dataclass
class Answers:
    """How the requests ended. Any thread.

    Counts those that ended, had the plain server's tokens, and were repeated; and lists what was wrong with others.
    """

    done: int = 0
    identical: int = 0
    asked_again: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, wish: Wish, tokens: Sequence[int] | str, expected: Sequence[int]) -> None:
        """Record that a request has ended with these tokens, or for this reason without any."""
        name = f"{len(wish.prompt)} + {wish.tokens} tokens{', streamed' if wish.streams else ''}"
        with self.lock:
            self.done += 1
            if isinstance(tokens, str):
                self.failed.append(f"{name}: {tokens}")
            elif list(tokens) == list(expected):
                self.identical += 1
            else:
                self.wrong.append(f"{name}: got {list(tokens)}, expected {list(expected)}")

    def report(self, counts: Mapping[str, Any], objections: Mapping[str, bool]) -> dict[str, Any]:
        """Return what has become of the requests, with further counts; and what is wrong, with those objections that hold."""
        said = [*self.wrong[:5], *self.failed[:5], *(text for text, holds in objections.items() if holds)]
        ended = {"requests": self.done, "identical": self.identical, "failed": len(self.failed)}
        return {**ended, **counts, "objections": said}

    def wait(self, count: int) -> None:
        """Wait until this many requests have ended; the client's timeout bounds each of them."""
        while self.done < count:
            time.sleep(0.05)


def wishes(requests: int) -> list[Wish]:
    """Return requests whose prompts are short and long, share prefixes, and repeat."""
    rng = random.Random(0)
    words = [f"{rng.choice('the a one no every'.split())} {rng.randrange(10**6)}" for _ in range(400)]
    shared = " ".join(words[:40])
    prompts = []
    for n in range(PROMPTS):
        own = " ".join(rng.choices(words, k=rng.choice((1, 4, 12, 60))))
        prompts.append(f"{shared} {own}" if n % 3 == 0 else f"{n} {own}")
    lengths = {prompt: rng.choice((1, 8, 24)) for prompt in prompts}
    chosen = [*prompts, *rng.choices(prompts, k=max(0, requests - len(prompts)))][:requests]
    rng.shuffle(chosen)
    return [Wish(prompt, lengths[prompt], rng.random() < 0.5) for prompt in chosen]


def expectations(model: Path, logs: Path, wanted: Iterable[Wish]) -> dict[str, list[int]]:
    """Return a plain server's tokens for each prompt. The server ends before the others start, to leave them its memory.

    Raises:
        ServerError: It did not start, or failed.
    """
    plain = Server("plain", model, logs)
    try:
        await_ready([plain], START_S)
        return {prompt: complete(plain, prompt, n).tokens for prompt, n in {(w.prompt, w.tokens) for w in wanted}}
    finally:
        plain.stop()


def ask(url: str, wish: Wish, expected: Sequence[int], answers: Answers, again: int = 0) -> None:
    """Make a request with the stock OpenAI client, including the retries that it makes by itself.

    ``again``: how often to repeat a failed request instead, also one that fails during a stream, which the client does not retry.
    """
    for n in range(again + 1):
        try:
            tokens: Sequence[int] | str = _ask(url, wish, {"max_retries": 0} if again else {})
        except Exception as error:
            tokens = f"{type(error).__name__}: {error}"
        if not isinstance(tokens, str) or n == again:
            return answers.add(wish, tokens, expected)
        with answers.lock:
            answers.asked_again += 1
        time.sleep(1.0)


def _ask(url: str, wish: Wish, options: dict[str, Any]) -> list[int]:
    from openai import OpenAI

    with OpenAI(base_url=f"{url}/v1", api_key="none", timeout=ANSWER_S, **options) as client:
        create = partial(
            client.completions.create,
            model=MODEL_NAME,
            prompt=wish.prompt,
            max_tokens=wish.tokens,
            temperature=0,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        parts: Iterable[Any] = create(stream=True) if wish.streams else [create(stream=False)]
        return [t for part in parts for choice in part.choices for t in getattr(choice, "token_ids", None) or ()]


class Clients(ThreadPoolExecutor):
    """A few clients of one URL, each with one request at a time. Leaving the block waits for all requests.

    ``expected`` holds the plain server's tokens by prompt; ``again`` is as for `ask`.
    """

    COUNT = 4

    def __init__(self, url: str, expected: Mapping[str, Sequence[int]], again: int = 0) -> None:
        super().__init__(self.COUNT)
        self._url, self._expected, self._again, self._sent = url, expected, again, 0
        self.answers = Answers()

    @property
    def waiting(self) -> int:
        """How many requests have not ended."""
        return self._sent - self.answers.done

    def send(self, wanted: Iterable[Wish]) -> None:
        """Queue these requests, which are made as clients become free."""
        for wish in wanted:
            self._sent += 1
            self.submit(ask, self._url, wish, self._expected[wish.prompt], self.answers, self._again)


def reported(requests: int, run: Callable[[Say], dict[str, Any]]) -> None:
    """Print the report of a run with this many requests; exit with 1 if it has objections, or if the run failed."""
    start, say = time.monotonic(), progress()
    with ended_by_sigterm():
        try:
            report = run(say)
        except (ServerError, OSError) as error:
            say(f"FAILED: {error}")
            report = {"requests": requests, "identical": 0, "failed": requests, "killed": 0, "joined": 0}
            report["objections"] = [str(error).splitlines()[0]]
    report["seconds"] = round(time.monotonic() - start, 1)
    print(json.dumps(report), flush=True)
    raise typer.Exit(int(bool(report["objections"])))
