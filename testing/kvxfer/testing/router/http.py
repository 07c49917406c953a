"""A client of HTTP servers that serve the OpenAI API: plain and streamed answers, answers that are hung up on, and metrics."""

from __future__ import annotations

import http.client
import json
import socket
import urllib.parse
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvxfer.errors import KvxferError

MAX_BYTES = 64 << 20
Samples = dict[str, list[tuple[dict[str, str], float]]]


class NoServerError(KvxferError):
    """Nothing answers at a URL, or what answers there does not serve the OpenAI API or kvxfer's metrics."""


@dataclass(frozen=True)
class HttpAnswer:
    """What a server has answered: the status, and the JSON objects, of which a streamed answer has several."""

    status: int
    parts: list[Any] = field(default_factory=list)


class HttpServer:
    """An HTTP server, by its URL.

    Args:
        url: Such as ``http://10.0.0.7:8000``; a path in front of ``/v1`` may follow.
        timeout: Seconds that it may be silent.

    Raises:
        NoServerError: The URL is not one.
    """

    def __init__(self, url: str, timeout: float = 60.0) -> None:
        parts = urllib.parse.urlsplit(url if "//" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise NoServerError(f"{url} is not the URL of an HTTP server, such as http://127.0.0.1:8000")
        self.url, self._timeout = (
            f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}",
            timeout,
        )
        self._where = parts.scheme, parts.hostname, port
        self._path = urllib.parse.urlsplit(self.url).path

    def _connection(self) -> http.client.HTTPConnection:
        scheme, host, port = self._where
        kind = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
        return kind(host, port, timeout=self._timeout)

    def _said(self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None) -> Any:
        connection = self._connection()
        try:
            connection.request(method, self._path + path, body, dict(headers or {}))
            answer = connection.getresponse()
            return answer.status, answer.getheader("Content-Type", ""), answer.read(MAX_BYTES)
        except (OSError, http.client.HTTPException) as e:
            raise NoServerError(f"{self.url} does not answer {path}: {str(e).strip() or type(e).__name__}") from None
        finally:
            connection.close()

    def model(self) -> str:
        """Return the name of the model that it serves.

        Raises:
            NoServerError: It does not answer, or not as a server of the OpenAI API.
        """
        status, _, text = self._said("GET", "/v1/models")
        try:
            if status == 200:
                return str(json.loads(text)["data"][0]["id"])
        except (ValueError, LookupError, TypeError, RecursionError):
            pass
        raise NoServerError(
            f"{self.url} is no server of the OpenAI API: it answers {status} to /v1/models, without a model"
        )

    def reach(self) -> None:
        """Check that something answers there; a router may know no more than the endpoints that it routes.

        Raises:
            NoServerError: Nothing does.
        """
        self._said("GET", "/v1/models")

    def metrics(self) -> Samples:
        """Return its metrics of kvxfer now.

        Raises:
            NoServerError: It does not answer, or has none.
        """
        status, _, text = self._said("GET", "/metrics")
        try:
            samples = read_samples(text.decode(errors="replace")) if status == 200 else {}
        except ValueError as e:
            raise NoServerError(f"{self.url}/metrics cannot be read as Prometheus would: {e}") from None
        if not samples:
            raise NoServerError(
                f"{self.url}/metrics has no metrics of kvxfer (status {status}); is kvxfer its connector?"
            )
        return samples

    def post(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> HttpAnswer:
        """Send a request, and return all of the answer.

        Raises:
            NoServerError: It does not answer, or breaks off.
        """
        headers = {"Content-Type": "application/json", **(headers or {})}
        status, kind, text = self._said("POST", path, json.dumps(body).encode(), headers)
        texts = [text]
        if "event-stream" in kind:
            texts = [line[5:].strip() for line in text.splitlines() if line.startswith(b"data:")]
        try:
            return HttpAnswer(status, [json.loads(text) for text in texts if text and text != b"[DONE]"])
        except (ValueError, RecursionError):
            if status >= 400:
                return HttpAnswer(status)
            raise NoServerError(f"{self.url} answers {path} with something other than JSON: {text[:80]!r}") from None

    def hang_up(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str], wait: Callable[[], object] | None = None
    ) -> None:
        """Send a request and hang up once ``wait`` returns; None: when the first of a streamed answer is here."""
        connection = self._connection()
        try:
            connection.request(
                "POST", self._path + path, json.dumps(body).encode(), {"Content-Type": "application/json", **headers}
            )
            if wait is None:
                connection.getresponse().readline()
            else:
                wait()
            if connection.sock is not None:
                connection.sock.shutdown(socket.SHUT_RDWR)
        except (OSError, http.client.HTTPException):
            pass  # it was faster
        finally:
            connection.close()


def read_samples(page: str) -> Samples:
    """Return the samples of kvxfer on a page in Prometheus's format, also where Ray has put its prefix before each name.

    Raises:
        ValueError: It is no such page.
    """
    found: Samples = defaultdict(list)
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if (name := sample.name.removeprefix("ray_")).startswith("kvxfer_"):
                found[name].append((dict(sample.labels), sample.value))
    return dict(found)
