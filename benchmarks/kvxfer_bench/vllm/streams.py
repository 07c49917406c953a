"""Answers as they stream from a real server: when each token came, and requests that decode meanwhile."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
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


class Others:
    """Requests that decode all the time, each followed by another.

    ``gaps``: when a token of one of them came, and how many seconds after the one before.
    """

    def __init__(self, server: Server, number: int, tokens: int) -> None:
        self._server, self._tokens, self._ends = server, tokens, threading.Event()
        self.gaps: list[tuple[float, float]] = []
        self._error: BaseException | None = None
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(number)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        try:
            self._decode()
        except BaseException as e:  # told by ``check``, on the thread that waits
            self._error = e

    def check(self) -> None:
        """Fail if one of them has ended.

        Raises:
            BaseException: What ended it.
        """
        if self._error is not None:
            raise self._error

    def _decode(self) -> None:
        while not self._ends.is_set():
            before = None
            for now in stream(self._server, "Once", self._tokens):
                if before is not None:
                    self.gaps.append((now, now - before))
                before = now
                if self._ends.is_set():
                    return

    def during(self, spans: list[tuple[float, float]]) -> list[float]:
        """Return the gaps that ended within one of these spans of time, in milliseconds."""
        return [1e3 * gap for at, gap in self.gaps if any(lo <= at <= hi for lo, hi in spans)]

    def stop(self) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join(60)


@contextmanager
def busy(server: Server, number: int, tokens: int) -> Iterator[Others]:
    """Keep a server decoding ``number`` requests of ``tokens`` tokens each, others following, from the start of the block to its end."""
    others = Others(server, number, tokens)
    try:
        while len(others.gaps) < 20 * number:
            others.check()
            time.sleep(0.05)
        yield others
    finally:
        others.stop()
