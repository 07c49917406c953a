"""Hints: which engines a router says may hold KV of a prompt, in any of the schemas that routers speak.

A hint names an engine's directory, and nothing else of it is believed: what that engine holds it is asked, by content. So an old or a
wrong hint costs one question. A hint that cannot be read is left out, and its request goes on without it.

Schemas, in this order; the first source that is named first is the router's first choice:

- ``kvxfer_sources``: a list of directories, each a text ``HOST:PORT``.
- ``remote_kv_source`` of vLLM's peer-to-peer tier: ``remote_host`` and ``remote_port``.
- NIXL's bidirectional mode: a prefill request (``do_remote_decode``) with what the decode engine answered at the last turn.
- ``kv_hint`` of Dynamo: an envelope of actions, of which ``kv.fetch`` names a ``source_control_endpoint``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvxfer.arguments import describe
from kvxfer.identity import Address, IdentityError, parse_address
from kvxfer.logs import logger
from kvxfer.security import Repeats
from kvxfer.text import printable
from kvxfer_vllm.params import ADDRESS, LONGEST, OURS, is_offer
from kvxfer_vllm.schemas import OTHERS, directory

__all__ = ["KEYS", "MAX_SOURCES", "SOURCES", "HintNotes", "Hints", "hints_of"]

log = logger("kvxfer.vllm")

SOURCES = "kvxfer_sources"
MAX_SOURCES = 8
"""The most engines that are asked for one request; a hint that names more is cut."""

HEARD = frozenset(
    {
        *OURS,
        *OTHERS,
        SOURCES,
        *("do_remote_prefill", "do_remote_decode", "transfer_id"),
        *(
            "remote_host",
            "remote_port",
            "remote_engine_id",
            "remote_block_ids",
            "remote_request_id",
            "remote_num_tokens",
        ),
        *("remote_decoder", "remote_prefiller", "remote_kv_source", "kv_hint"),
        # Facts about the other engine that its own descriptors tell, or that it alone needs.
        *("tp_size", "dcp_size", "pp_size", "transfer_mode", "remote_blocks_expiry_time"),
        *("remote_registration_generation", "remote_prefill_cached_tokens"),
        "prompt_token_ids",  # for vLLM's front end
    }
)
"""The keys that mean something here, or that are known to need no meaning."""

EVERY_S = 10.0
"""Seconds from one log line about loads to the next, for each kind of hint."""
MAX_SAID = 100
"""Keys of which the log says that they are not used; clients can make up as many as they like."""

FETCHES = {"kv.fetch", "kv.source_locations"}
"""Actions of ``kv_hint`` that name a source; the second is the former name of the first."""
ENDPOINT = "tcp://"


class Hints(NamedTuple):
    """What params say about engines that may hold a prefix."""

    sources: tuple[Address, ...] = ()  # the directories to ask, each once
    kind: str = ""  # the schema that has named the first of them
    notes: tuple[tuple[str, str], ...] = ()  # what cannot be used, by key, and why


class _UnreadableError(Exception):
    """A hint that names no engine."""


def hints_of(params: Mapping[str, Any]) -> Hints:
    """Read the hints of a request's ``kv_transfer_params``, as the router sent them."""
    found: dict[Address, str] = {}  # and who has named it first
    notes = [(key, "is not known") for key, value in params.items() if value is not None and key not in HEARD]
    for key, (kind, read) in READERS.items():
        try:
            for source in read(params):
                found.setdefault(source, kind)
        except _UnreadableError as e:
            notes.append((key, f"names no engine to ask: {e}"))
    if len(found) > MAX_SOURCES:
        notes.append((SOURCES, f"is cut: a request names {MAX_SOURCES} engines at the most, all hints together"))
    return Hints(tuple(found)[:MAX_SOURCES], next(iter(found.values()), ""), tuple(notes))


def _listed(params: Mapping[str, Any]) -> Iterator[Address]:
    value = params.get(SOURCES, ())
    if value is None:
        return
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise _UnreadableError(f"not a list: {describe(value)}")
    for one in value[: MAX_SOURCES + 1]:
        yield _parsed(one)


def _tier(params: Mapping[str, Any]) -> Iterator[Address]:
    value = params.get("remote_kv_source")
    if value is None:
        return
    if not isinstance(value, Mapping):
        raise _UnreadableError(f"not a mapping: {describe(value)}")
    yield _directory(value.get("remote_host"), value.get("remote_port"))


def _bidirectional(params: Mapping[str, Any]) -> Iterator[Address]:
    """Read what the decode engine of the last turn answered. The example router replaces its host, but not our own key."""
    if not is_offer(params) or params.keys() & OTHERS:  # MoRIIO's tells a prefill engine where to write
        return
    if params.get(ADDRESS) is not None:
        yield _parsed(params[ADDRESS])
    elif params.get("remote_port") is not None:  # which other schemas do not give to a prefill engine
        yield _directory(params.get("remote_host"), params.get("remote_port"))


def _envelope(params: Mapping[str, Any]) -> Iterator[Address]:
    value = params.get("kv_hint")
    if value is None:
        return
    actions = value.get("actions") if isinstance(value, Mapping) else None
    if not isinstance(actions, Sequence) or isinstance(actions, str | bytes):
        raise _UnreadableError(f"no list of actions: {describe(value)}")
    for action in actions[:MAX_SOURCES]:
        kind = action.get("action_type") if isinstance(action, Mapping) else None
        if not isinstance(kind, str) or kind not in FETCHES:
            continue
        if not str(action.get("action_version", "1"))[:8].startswith("1"):
            raise _UnreadableError(f"action_version is {describe(action['action_version'])}, and only 1 is known")
        payload = action.get("payload")
        endpoint = payload.get("source_control_endpoint") if isinstance(payload, Mapping) else None
        yield _parsed(endpoint.removeprefix(ENDPOINT) if isinstance(endpoint, str) else endpoint)


READERS = {
    SOURCES: (SOURCES, _listed),
    "remote_kv_source": ("remote_kv_source", _tier),
    "remote_host": ("nixl", _bidirectional),
    "kv_hint": ("kv_hint", _envelope),
}
"""By the key that is at fault if a hint cannot be read: what the hints of a schema are called, and what reads them."""
KEYS = {kind: key for key, (kind, _) in READERS.items()}
"""By what the hints of a schema are called: the key that has them."""


def _parsed(text: Any) -> Address:
    if not isinstance(text, str) or len(text) > LONGEST:
        raise _UnreadableError(f"not an address: {describe(text)}")
    try:
        return parse_address(text)
    except IdentityError:
        raise _UnreadableError(f"not an address: {describe(text)}") from None


def _directory(host: Any, port: Any) -> Address:
    found = directory(host, port)
    if found is None:
        raise _UnreadableError(f"remote_host and remote_port are {describe(host)} and {describe(port)}")
    return found


class HintNotes:
    """Reads hints, and says once of each key that it is not used, and why. One thread."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._repeats = Repeats(EVERY_S)

    def read(self, params: Mapping[str, Any]) -> Hints:
        """Return the hints of a request's ``kv_transfer_params``."""
        if not params:
            return Hints()
        hints = hints_of(params)
        for key, why in hints.notes:
            self.unused(key, why)
        return hints

    def loads(self, request: str, kind: str, tokens: int, of: int) -> None:
        """Say that a request loads a prefix because of a hint, but not of each."""
        held = self._repeats.logged(kind)
        if held is not None:
            more = f" ({held} more have been left out here)" if held else ""
            what = "request %s loads %d of the %d tokens of its prompt from another engine, which its %s names%s"
            log.info(what, printable(request), tokens, of, kind, more)

    def unused(self, key: str, why: str) -> None:
        """Say, if it is the first time, that a key of ``kv_transfer_params`` is not used."""
        if key not in self._said and len(self._said) < MAX_SAID:
            self._said.add(key)
            log.warning("kv_transfer_params: %s %s; kvxfer does not use it (said once)", printable(key), why)
