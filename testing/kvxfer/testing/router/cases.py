"""The table: requests of the OpenAI API, and what must become of their KV."""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
LIKELIEST = {"temperature": 1.0, "top_k": 1}
"""The likeliest token each time, as with temperature 0, with which vLLM allows no n above 1."""


class Moves(enum.StrEnum):
    """Whether KV moves for a case."""

    YES = "yes"
    NO = "no"
    EITHER = "either"


class Texts:
    """Prompts that no engine has seen, so that nothing of them is cached."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def words(self, length: int = 150) -> str:
        return "".join(self._random.choice("abcdefghijklmnopqrstuvwxyz     ") for _ in range(length)).strip() + "."

    def ids(self, count: int = 100) -> list[int]:
        """Return ``count`` token ids, which any vocabulary has."""
        return [self._random.randrange(33, 120) for _ in range(count)]

    def name(self) -> str:
        """Return an id for requests."""
        return f"contract-{self._random.getrandbits(48):x}"


class HangUp(enum.Enum):
    """When a client hangs up on a request.

    Not some time after it: that may be the moment in which a prefill engine answers. If the router hangs up on it then, the engine
    holds its offers for the lease, and nobody has broken the contract.
    """

    EARLY = enum.auto()  # a moment after it, while a long prompt is prefilled
    DECODING = enum.auto()  # once a decode engine has it, and before the answer
    FIRST_TOKEN = enum.auto()  # when the first of a streamed answer is here


@dataclass(frozen=True)
class HttpRequest:
    """One HTTP request."""

    path: str  # the endpoint
    body: Mapping[str, Any]  # what is sent, without the model
    name: str = ""  # its ``X-Request-Id``; empty for none
    hang_up: HangUp | None = None  # when the client hangs up, if it does


@dataclass(frozen=True)
class RouterCase:
    """A row of the table."""

    name: str  # how reports call it
    what: str  # what is asked for
    moves: Moves  # whether KV moves
    make: Callable[[Texts], list[HttpRequest]] = field(repr=False)  # makes the requests
    at_once: bool = False  # whether they are sent at once; else each when the one before is answered
    rejected: bool = False  # whether the plain server rejects them, and so must the router


def _completion(prompt: Any, **more: Any) -> HttpRequest:
    return HttpRequest(COMPLETIONS, {"prompt": prompt, "max_tokens": 12, **LIKELIEST, **more})


def _chat(text: str, **more: Any) -> HttpRequest:
    return HttpRequest(CHAT, {"messages": [{"role": "user", "content": text}], "max_tokens": 12, **LIKELIEST, **more})


def _named(request: HttpRequest, name: str) -> HttpRequest:
    return HttpRequest(request.path, request.body, name)


def _hung_up(request: HttpRequest, when: HangUp) -> HttpRequest:
    return HttpRequest(request.path, request.body, request.name, when)


_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a place.",
        "parameters": {"type": "object", "properties": {"far": {"type": "boolean"}}, "required": ["far"]},
    },
}
_SCHEMA = {
    "type": "object",
    "properties": {"far": {"type": "boolean"}},
    "required": ["far"],
    "additionalProperties": False,
}

Y, N, E = Moves.YES, Moves.NO, Moves.EITHER


def _several(count: int, one_at: int | None = None) -> Callable[[Texts], list[Any]]:
    def prompts(t: Texts) -> list[Any]:
        return [t.ids(1) if i == one_at else t.ids(100 + i) for i in range(count)]

    return prompts


def _under_one_name(t: Texts, bodies: list[HttpRequest]) -> list[HttpRequest]:
    name = t.name()
    return [_named(request, name) for request in bodies]


CASES: tuple[RouterCase, ...] = (
    RouterCase("completion", "a completion of a string", Y, lambda t: [_completion(t.words())]),
    RouterCase("completion-ids", "a completion of token ids", Y, lambda t: [_completion(t.ids())]),
    RouterCase("completion-long", "a prompt that several steps compute", Y, lambda t: [_completion(t.ids(700))]),
    RouterCase("completion-streamed", "a streamed completion", Y, lambda t: [_completion(t.words(), stream=True)]),
    RouterCase(
        "completion-usage",
        "a streamed completion with its usage",
        Y,
        lambda t: [_completion(t.words(), stream=True, stream_options={"include_usage": True})],
    ),
    RouterCase("one-token", "a prompt of one token", E, lambda t: [_completion(t.ids(1))]),
    *(
        RouterCase(f"n-{n}", f"{n} samples of a prompt", Y, lambda t, n=n: [_completion(t.words(), n=n)])  # type: ignore[misc]
        for n in (2, 4, 8)
    ),
    RouterCase("n-streamed", "3 samples, streamed", Y, lambda t: [_completion(t.words(), n=3, stream=True)]),
    RouterCase("n-seeded", "2 samples with a seed", Y, lambda t: [_completion(t.words(), n=2, seed=7)]),
    RouterCase("best-of", "`best_of`", E, lambda t: [_completion(t.words(), best_of=3)]),
    RouterCase("list", "a list of 3 prompts", Y, lambda t: [_completion(_several(3)(t))]),
    RouterCase("list-texts", "a list of 3 texts", Y, lambda t: [_completion([t.words() for _ in range(3)])]),
    RouterCase(
        "list-streamed", "a list of 3 prompts, streamed", Y, lambda t: [_completion(_several(3)(t), stream=True)]
    ),
    RouterCase("list-n", "a list of 2 prompts, 2 samples of each", Y, lambda t: [_completion(_several(2)(t), n=2)]),
    *(
        RouterCase(
            f"list-one-token-{at}",
            f"a list of 3 prompts, of which number {at + 1} has one token",
            Y,
            lambda t, at=at: [_completion(_several(3, at)(t))],  # type: ignore[misc]
        )
        for at in (0, 1, 2)
    ),
    RouterCase("list-twice", "a list with the same prompt twice", Y, lambda t: [_completion([ids := t.ids(), ids])]),
    RouterCase("echo", "`echo`", Y, lambda t: [_completion(t.words(), echo=True)]),
    RouterCase(
        "echo-logprobs",
        "`echo` with logprobs of the prompt",
        E,
        lambda t: [_completion(t.words(), echo=True, logprobs=2)],
    ),
    RouterCase("logprobs", "logprobs of what is generated", Y, lambda t: [_completion(t.words(), logprobs=3)]),
    RouterCase(
        "prompt-logprobs",
        "`prompt_logprobs`: the decode engine prefills all of the prompt",
        E,
        lambda t: [_completion(t.words(), prompt_logprobs=1)],
    ),
    RouterCase("stop", "stop strings", Y, lambda t: [_completion(t.words(), stop=["e", "a"])]),
    RouterCase("stop-ids", "stop token ids", Y, lambda t: [_completion(t.words(), stop_token_ids=[40, 41, 42])]),
    RouterCase("min-tokens", "`min_tokens`", Y, lambda t: [_completion(t.words(), min_tokens=5)]),
    RouterCase("max-tokens-1", "one token", Y, lambda t: [_completion(t.words(), max_tokens=1)]),
    RouterCase(
        "penalties", "penalties", Y, lambda t: [_completion(t.words(), repetition_penalty=1.2, presence_penalty=0.5)]
    ),
    RouterCase("bias", "`logit_bias`", Y, lambda t: [_completion(t.words(), logit_bias={"65": 5.0})]),
    RouterCase(
        "regex",
        "structured output: a regular expression",
        Y,
        lambda t: [_completion(t.words(), structured_outputs={"regex": "[a-z]{40}"})],
    ),
    RouterCase("salt", "`cache_salt`", Y, lambda t: [_completion(t.words(), cache_salt=t.name())]),
    RouterCase("chat", "a chat", Y, lambda t: [_chat(t.words())]),
    RouterCase("chat-streamed", "a streamed chat", Y, lambda t: [_chat(t.words(), stream=True)]),
    RouterCase("chat-n", "3 samples of a chat", Y, lambda t: [_chat(t.words(), n=3)]),
    RouterCase("chat-logprobs", "a chat with logprobs", Y, lambda t: [_chat(t.words(), logprobs=True, top_logprobs=2)]),
    RouterCase(
        "chat-schema",
        "structured output: a JSON schema",
        Y,
        lambda t: [
            _chat(t.words(), response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}})
        ],
    ),
    RouterCase("chat-tools", "tools, and no call", Y, lambda t: [_chat(t.words(), tools=[_TOOL], tool_choice="none")]),
    RouterCase(
        "chat-tool-named",
        "a call of a named tool",
        Y,
        lambda t: [_chat(t.words(), tools=[_TOOL], tool_choice={"type": "function", "function": {"name": "look"}})],
    ),
    RouterCase(
        "chat-completion-tokens",
        "`max_completion_tokens`",
        Y,
        lambda t: [_chat(t.words(), max_tokens=None, max_completion_tokens=12)],
    ),
    RouterCase(
        "responses",
        "the Responses API",
        Y,
        lambda t: [HttpRequest(RESPONSES, {"input": t.words(), "max_output_tokens": 16, "store": False, **LIKELIEST})],
    ),
    RouterCase(
        "messages",
        "the Messages API",
        Y,
        lambda t: [
            HttpRequest(MESSAGES, {"messages": [{"role": "user", "content": t.words()}], "max_tokens": 12, **LIKELIEST})
        ],
    ),
    RouterCase(
        "one-id",
        "5 requests under one id in parallel",
        Y,
        lambda t: _under_one_name(t, [_completion(t.ids(100 + i)) for i in range(5)]),
        True,
    ),
    RouterCase(
        "one-id-in-turn",
        "3 requests under one id, one after the other",
        Y,
        lambda t: _under_one_name(t, [_completion(t.ids(100 + i)) for i in range(3)]),
    ),
    RouterCase(
        "one-id-same",
        "one prompt 3 times under one id in parallel",
        Y,
        lambda t: _under_one_name(t, 3 * [_completion(t.ids())]),
        True,
    ),
    RouterCase(
        "one-id-lists",
        "2 lists under one id in parallel",
        Y,
        lambda t: _under_one_name(t, [_completion(_several(3)(t)) for _ in range(2)]),
        True,
    ),
    RouterCase("again", "the same request twice, one after the other", Y, lambda t: 2 * [_completion(t.words())]),
    RouterCase(
        "rejected",
        "a request that every engine rejects",
        N,
        lambda t: [_completion(t.words(), logit_bias={"99999999": 1.0})],
        rejected=True,
    ),
    RouterCase("rejected-n", "`n` 0", N, lambda t: [_completion(t.words(), n=0)], rejected=True),
    RouterCase(
        "rejected-by-decode",
        "more tokens than fit, which only the decode engine is asked for",
        E,
        lambda t: [_completion(t.words(), max_tokens=100_000_000)],
        rejected=True,
    ),
    RouterCase(
        "rejected-list-by-decode",
        "the same with a list of 3 prompts",
        E,
        lambda t: [_completion(_several(3)(t), max_tokens=100_000_000)],
        rejected=True,
    ),
    RouterCase(
        "rejected-stream-options",
        "`stream_options` without `stream`, which only the decode engine is sent",
        E,
        lambda t: [_completion(t.words(), stream_options={"include_usage": True})],
        rejected=True,
    ),
    RouterCase(
        "hang-up-early",
        "a client that hangs up during prefill",
        E,
        lambda t: [_hung_up(_completion(t.ids(1500)), HangUp.EARLY)],
    ),
    RouterCase(
        "hang-up-soon",
        "a client that hangs up during decode",
        E,
        lambda t: [_hung_up(_completion(t.ids(700), max_tokens=200), HangUp.DECODING)],
    ),
    RouterCase(
        "hang-up-late",
        "a client that hangs up at the first token",
        E,
        lambda t: [_hung_up(_completion(t.ids(), max_tokens=400, stream=True), HangUp.FIRST_TOKEN)],
    ),
    RouterCase(
        "hang-up-n",
        "the same with 3 samples",
        E,
        lambda t: [_hung_up(_completion(t.ids(), n=3, max_tokens=400, stream=True), HangUp.FIRST_TOKEN)],
    ),
    RouterCase(
        "hang-up-list",
        "a client that hangs up on a list",
        E,
        lambda t: [_hung_up(_completion(_several(3)(t), max_tokens=200), HangUp.DECODING)],
    ),
)
