"""Answers as they stream from a real server: when each token came, and requests that decode meanwhile."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from kvxfer_vllm.demo.routing import greedy
from kvxfer_vllm.demo.servers import Server


def streamed(
    server: Server, path: str, body: Mapping[str, Any], name: str | None = None, timeout: float = 60.0
) -> Iterator[tuple[float, bytes]]:
    """Yield when each piece of an answer has come, by ``time.perf_counter``, and its JSON. ``name`` is the ``X-Request-Id``.

    Raises:
        ServerError: It failed the request.
    """
    headers = {"Content-Type": "application/json"} | ({} if name is None else {"X-Request-Id": name})
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=timeout)
    try:
        connection.request("POST", path, json.dumps({**body, "stream": True}), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise server.error(f"answered {answer.status}: {answer.read(500).decode(errors='replace')}")
        for line in answer:
            if line.startswith(b"data: {"):
                if b'"error"' in line:
                    raise server.error(f"failed a request: {line[:500].decode(errors='replace')}")
                yield time.perf_counter(), line[6:]
    except (OSError, http.client.HTTPException) as error:
        raise server.error(f"did not answer a request: {error!r}") from None
    finally:
        connection.close()


def stream(
    server: Server,
    prompt: str | Sequence[int],
    tokens: int,
    params: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> Iterator[float]:
    """Yield when each piece of a vLLM server's answer to a text, or to token ids, has come."""
    return (at for at, _ in streamed(server, "/v1/completions", greedy(prompt, tokens, params), name))


@contextmanager
def repeating(number: int, once: Callable[[threading.Event], object]) -> Iterator[Callable[[], None]]:
    """Have threads do something again and again until the block ends, which sets the event; yield what raises the error of one.

    The end of the block raises it as well.
    """
    ends = threading.Event()

    def run() -> None:
        while not ends.is_set():
            once(ends)

    with ThreadPoolExecutor(number) as pool:
        running = [pool.submit(run) for _ in range(number)]

        def check() -> None:
            for future in running:
                if future.done():
                    future.result()

        try:
            yield check
        finally:
            ends.set()
    check()


@contextmanager
def busy(server: Server, number: int, tokens: int) -> Iterator[list[float]]:
    """Keep a server decoding ``number`` requests of ``tokens`` tokens each, others following, until the block ends.

    Yields the times at which their tokens have come, but for the first of each.
    """
    came: list[float] = []

    def once(ends: threading.Event) -> None:
        answer = stream(server, "Once", tokens)
        next(answer, None)
        for now in answer:
            came.append(now)
            if ends.is_set():
                return

    with repeating(number, once) as check:
        while len(came) < 20 * number:
            check()
            time.sleep(0.05)
        yield came
