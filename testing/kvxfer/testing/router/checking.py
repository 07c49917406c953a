"""Send a case through a deployment, and say whether the contract is kept: the plain server's answer, KV that moves, nothing held."""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from kvxfer.testing.router.cases import HangUp, HttpRequest, Moves, RouterCase, Texts
from kvxfer.testing.router.http import HttpAnswer, HttpServer, NoServerError

WORKED = ("delivered", "computed", "elsewhere", "cancelled")
STEP: dict[str, Any] = {"prompt": [65], "max_tokens": 1}
MOMENT_S = 0.01


@dataclass(frozen=True)
class Deployment:
    """A router and the engines behind it, which serve nobody else meanwhile."""

    router: HttpServer  # what is tested
    plain: HttpServer  # a server of the same model whose answers are right: without a connector, or a prefill engine
    prefill: Sequence[HttpServer]
    decode: Sequence[HttpServer]
    model: str
    within: float = 5.0  # seconds after its answer within which nothing may be held for a request; less than the lease


@dataclass(frozen=True)
class RouterResult:
    """What has become of a case."""

    case: str  # its name
    # whether the contract is kept. ``left out``: the plain server does not serve such requests either
    outcome: Literal["kept", "broken", "left out"]
    said: str  # what is broken, or why it was left out
    nbytes: int  # the bytes of KV that moved
    seconds: float  # how long it took


def check(case: RouterCase, deployment: Deployment, texts: Texts) -> RouterResult:
    """Send the requests of a case through the router, and judge what comes of it. Blocks.

    Raises:
        NoServerError: An engine or the plain server does not answer.
    """
    began, requests = time.monotonic(), case.make(texts)
    before = _Totals.now(deployment)
    with ThreadPoolExecutor(len(requests) if case.at_once else 1) as pool:
        answers = list(pool.map(lambda request: _routed(deployment, before, request), requests))
    after = _settled(deployment)
    right = [_sent(deployment.plain, deployment.model, request) for request in requests if request.hang_up is None]
    wrong = list(_wrong(case, [answer for answer in answers if answer is not None], right))
    unserved = [
        f"the plain server answers {a.status} too" for a in right if isinstance(a, HttpAnswer) and a.status >= 400
    ]
    served = not unserved or case.rejected
    if served and not wrong:
        wrong += _moved(case, requests, before, after)
    if after.offers or after.loads:
        held = f"{after.offers:.0f} offers and {after.loads:.0f} loads"
        wrong.append(f"{deployment.within:g} s after the answer the engines still hold {held}")
    outcome: Literal["kept", "broken", "left out"] = "broken" if wrong else "kept" if served else "left out"
    nbytes = int(after.nbytes - before.nbytes)
    return RouterResult(
        case.name, outcome, "; ".join(wrong or unserved * (not served)), nbytes, time.monotonic() - began
    )


def _routed(deployment: Deployment, before: _Totals, request: HttpRequest) -> HttpAnswer | str | None:
    """Return the router's answer; a text if there is none; None if it was hung up on."""
    if request.hang_up is None:
        return _sent(deployment.router, deployment.model, request)

    def decoding() -> None:
        until, now = time.monotonic() + deployment.within, before
        while not now.loads and now.requests == before.requests and time.monotonic() < until:
            time.sleep(MOMENT_S)
            now = _Totals.now(deployment)

    waits: dict[HangUp, Callable[[], object]] = {HangUp.EARLY: partial(time.sleep, MOMENT_S), HangUp.DECODING: decoding}
    deployment.router.hang_up(request.path, *_said(deployment.model, request), waits.get(request.hang_up))
    return None


def _sent(server: HttpServer, model: str, request: HttpRequest) -> HttpAnswer | str:
    """Return the answer; a text if there is none."""
    try:
        return server.post(request.path, *_said(model, request))
    except NoServerError as e:
        return str(e)


def _said(model: str, request: HttpRequest) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a request's body and headers."""
    return {"model": model, **request.body}, {"X-Request-Id": request.name} if request.name else {}


def _wrong(case: RouterCase, answers: Iterable[Any], right: Iterable[Any]) -> Iterable[str]:
    """Yield in what the router's answers differ from the plain server's."""
    for i, (found, expected) in enumerate(zip(answers, right, strict=True)):
        which = f"request {i + 1}: " if i else ""
        if isinstance(expected, str):
            raise NoServerError(expected)
        if case.rejected and expected.status < 400:
            yield f"{which}the plain server does not reject it"
        elif isinstance(found, str):
            yield f"{which}{found}"
        elif (found.status >= 400) != (expected.status >= 400):
            yield f"{which}the router answers {found.status}, the plain server {expected.status}: {_shown(found)}"
        elif expected.status < 400 and _content(found) != _content(expected):
            yield f"{which}the router's answer is another than the plain server's: {_first_difference(found, expected)}"


def _shown(answer: HttpAnswer) -> str:
    return json.dumps(answer.parts)[:200]


def _first_difference(found: HttpAnswer, expected: HttpAnswer) -> str:
    ours, theirs = _content(found), _content(expected)
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key) != theirs.get(key):
            return f"{key} is {ours.get(key)!r:.100} instead of {theirs.get(key)!r:.100}"
    return ""


def _content(answer: HttpAnswer) -> dict[str, Any]:
    """Return what an answer says, by choice, however it was cut into parts."""
    out: defaultdict[str, Any] = defaultdict(str)
    for part in answer.parts:
        if not isinstance(part, dict):
            continue
        for choice in part.get("choices") or ():
            at = f"choice {choice.get('index')}"
            message = choice.get("message") or choice.get("delta") or {}
            out[f"text of {at}"] += choice.get("text") or message.get("content") or ""
            for call in message.get("tool_calls") or ():
                function = call.get("function") or {}
                out[f"call of {at}"] += (function.get("name") or "") + (function.get("arguments") or "")
            if choice.get("finish_reason"):
                out[f"end of {at}"] = choice["finish_reason"]
            if isinstance(logprobs := choice.get("logprobs"), dict):
                out[f"logprobs of {at}"] += str(
                    logprobs.get("tokens") or [t.get("token") for t in logprobs.get("content") or ()]
                )
        for item in part.get("output") or ():  # Responses
            out["output"] += "".join(
                str(piece.get("text")) for piece in item.get("content") or () if isinstance(piece, dict)
            )
        for piece in part.get("content") or ():  # Messages
            out["content"] += str(piece.get("text")) if isinstance(piece, dict) else ""
    return {key: said for key, said in out.items() if said}


@dataclass(frozen=True)
class _Totals:
    """Sums of the engines' metrics at one moment."""

    offers: float  # in hand at the prefill engines
    loads: float  # in hand at the decode engines
    nbytes: float
    requests: Counter[str]
    not_offered: Counter[str]

    @classmethod
    def now(cls, deployment: Deployment) -> _Totals:
        requests, not_offered, nbytes, offers, loads = Counter[str](), Counter[str](), 0.0, 0.0, 0.0
        for server in deployment.decode:
            samples = server.metrics()
            loads += sum(value for _, value in samples.get("kvxfer_loads_in_hand", ()))
            nbytes += sum(value for _, value in samples.get("kvxfer_kv_bytes_total", ()))
            for has, value in samples.get("kvxfer_requests_total", ()):
                requests[has.get("outcome", "?")] += int(value)
        for server in deployment.prefill:
            samples = server.metrics()
            offers += sum(value for _, value in samples.get("kvxfer_offers_in_hand", ()))
            for has, value in samples.get("kvxfer_not_offered_total", ()):
                not_offered[has.get("reason", "?")] += int(value)
        return cls(offers, loads, nbytes, requests, not_offered)


def _prompts(requests: Iterable[HttpRequest]) -> int:
    """Return how many different prompts the requests have, without those of one token, which leave nothing to move."""
    found = set()
    for body in (request.body for request in requests):
        prompt = body.get("prompt") or body.get("input") or body.get("messages")
        several = isinstance(prompt, list) and isinstance(prompt[0], (list, str))
        found |= {json.dumps(one) for one in (prompt if several else [prompt]) if len(one) > 1 or one is prompt}  # type: ignore[arg-type, union-attr]
    return len(found)


def _moved(case: RouterCase, requests: Iterable[HttpRequest], before: _Totals, after: _Totals) -> Iterable[str]:
    """Yield what is wrong about the KV that moved."""
    moved, ended = after.nbytes - before.nbytes, after.requests - before.requests
    failed = {kind: n for kind, n in ended.items() if kind not in WORKED}
    why = "; ".join(f"{n} not offered ({reason})" for reason, n in (after.not_offered - before.not_offered).items())
    if failed and case.moves is Moves.YES:
        yield f"loads have failed: {', '.join(f'{n} {kind}' for kind, n in failed.items())}"
    if case.moves is Moves.YES and not moved:
        asked = sum(ended.values())
        told = (
            f"{asked} requests came with params"
            if asked
            else "no request came with params: does the router pass them on?"
        )
        yield f"no KV has moved ({why or told})"
    elif case.moves is Moves.YES and ended["delivered"] < (prompts := _prompts(requests)):
        yield f"the KV of {ended['delivered']} prompts has moved, not of {prompts}{why and f' ({why})'}"
    if case.moves is Moves.NO and moved:
        yield f"{moved:.0f} bytes of KV have moved for nothing"


def _settled(deployment: Deployment) -> _Totals:
    """Return the totals once the engines hold nothing, or when the time for that is over. Blocks."""
    until = time.monotonic() + deployment.within
    while True:
        for server in (*deployment.prefill, *deployment.decode):  # gauges tell of the last step
            server.post("/v1/completions", {"model": deployment.model, **STEP})
        totals = _Totals.now(deployment)
        if not (totals.offers or totals.loads) or time.monotonic() > until:
            return totals
        time.sleep(0.1)
