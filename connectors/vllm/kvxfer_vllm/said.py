"""What a request says: its router's ``kv_transfer_params``, read once and at one door (``read_params``), and what vLLM's request ids say.

P is the prefill engine, D the decode engine. A router that waits for P sends ``do_remote_decode`` to it. P's answer has
``do_remote_prefill``, the address of its directory, and under kvxfer's keys that address again, the transfer's base id and digest, P's
epoch and a hash of its facts; the router forwards it to D unchanged. Some routers overwrite ``remote_host`` with the address of P's HTTP
server, so the address under kvxfer's key takes precedence. A router that sends to both at once names the transfer itself:

==================== ==================================== =================================================================
schema               the prefill engine gets              the decode engine gets
==================== ==================================== =================================================================
kvxfer's             ``transfer_id``                      ``transfer_id``, ``remote_host``, ``remote_port``
vLLM's tier          ``remote_decoder``:                  ``remote_prefiller``: {``kv_request_id``, ``remote_host``,
                     {``kv_request_id``}                  ``remote_port``}
MoRIIO's             ``transfer_id``                      ``transfer_id``, ``remote_host``, ``remote_handshake_port``, perhaps
                                                          ``remote_dp_rank``
Mooncake's           ``transfer_id``                      ``transfer_id``, ``remote_bootstrap_addr`` (a URL)
NIXL's, both at once nothing: it names what it offers by  ``remote_request_id`` (the X-Request-Id of both), ``remote_host``,
                     the request's id                     ``remote_port``
==================== ==================================== =================================================================

The port is always that of kvxfer's directory. A hint names an engine's directory, and nothing else of it is believed: what that engine
holds it is asked, by content. A hint that cannot be read is left out, and its request goes on without it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct

from kvxfer.arguments import describe
from kvxfer.engine import Ticket
from kvxfer.errors import UNREADABLE
from kvxfer.identity import (
    Address,
    IdentityError,
    Source,
    TransferBase,
    TransferId,
    canonical_host,
    is_ip,
    parse_address,
)
from kvxfer.logs import logger
from kvxfer.security import Repeats
from kvxfer.text import printable
from kvxfer.values import MAX_DIGEST, MAX_TOKENS

log = logger("kvxfer.vllm")

# --- the schemas ---------------------------------------------------------------------------------------------------

LONGEST = 4096
"""Characters that a text in params may have; vLLM's request ids are far shorter."""
Text = Annotated[str, Meta(max_length=LONGEST)]
MAX_PORT = 65535
Port = Annotated[int, Meta(ge=1, le=MAX_PORT)]


class Where(Struct, frozen=True):
    """NIXL's keys of a directory."""

    remote_host: Text | None = None
    remote_port: Port | None = None


class Answer(Where, frozen=True):
    """What P answers: kvxfer's keys beside NIXL's. Or what a router writes that sends to both at once.

    What tells of P's prompt, and only saves a vain load, may be of any kind: then it counts as not said. Names are read by ``_name``.
    """

    transfer_id: Any = None
    remote_request_id: Any = None
    remote_num_tokens: Any = None
    kvxfer_transfer: Text | None = None
    kvxfer_epoch: Text | None = None
    kvxfer_digest: Any = None
    kvxfer_address: Text | None = None
    kvxfer_facts: Any = None
    kvxfer_alone: bool | None = None


class MoRIIO(Struct, frozen=True):
    """MoRIIO's port, of the first data-parallel rank."""

    remote_handshake_port: Port | None = None
    remote_dp_rank: Annotated[int, Meta(ge=0, le=MAX_PORT)] | None = None

    @property
    def port(self) -> int | None:
        """The port of the rank that P's router chose.

        Raises:
            UnreadableError: There is no such port.
        """
        if self.remote_handshake_port is None:
            return None
        port = self.remote_handshake_port + (self.remote_dp_rank or 0)
        if port > MAX_PORT:
            raise UnreadableError(
                f"remote_handshake_port {self.remote_handshake_port} plus remote_dp_rank is above {MAX_PORT}"
            )
        return port


class Mooncake(Struct, frozen=True):
    """Mooncake's URL."""

    remote_bootstrap_addr: Text | None = None


class Decoder(Struct, frozen=True):
    """Who is to load, in vLLM's peer-to-peer tier as llm-d's ``offloading`` writes it. P need not know where it is."""

    kv_request_id: Any = None


class Prefiller(Where, frozen=True):
    """Whose KV is to be loaded, in the same schema."""

    kv_request_id: Any = None


class Tier(Struct, frozen=True):
    """The schema of vLLM's peer-to-peer tier."""

    remote_decoder: Decoder | None = None
    remote_prefiller: Prefiller | None = None


class FetchPayload(Struct, frozen=True):
    """What ``kv.fetch`` says of its source."""

    source_control_endpoint: Text


class FetchAction(Struct, frozen=True):
    """An action of Dynamo's ``kv_hint`` that names a source."""

    payload: FetchPayload
    action_version: Annotated[str, Meta(pattern=r"^1(\.|$)")] = "1"


class Envelope(Struct, frozen=True):
    """Dynamo's ``kv_hint``."""

    actions: list[Any]


HOST, PORT = "remote_host", "remote_port"
TRANSFER, EPOCH, DIGEST, ADDRESS = "kvxfer_transfer", "kvxfer_epoch", "kvxfer_digest", "kvxfer_address"
FACTS, TOKENS, REQUEST, ALONE = "kvxfer_facts", "remote_num_tokens", "remote_request_id", "kvxfer_alone"
SOURCES = "kvxfer_sources"
OTHERS = frozenset(
    {
        *("remote_handshake_port", "remote_dp_rank", "remote_bootstrap_addr", "remote_notify_port", "remote_hosts"),
        *("remote_dp_size", "remote_dp_size_local", "remote_tp_size"),
    }
)
"""Keys of MoRIIO's and Mooncake's: those that are read, and those that kvxfer's descriptors make needless."""
HEARD = frozenset(
    {
        *(*Answer.__struct_fields__, *OTHERS, *Tier.__struct_fields__, SOURCES, "remote_kv_source", "kv_hint"),
        *("do_remote_prefill", "do_remote_decode", "remote_engine_id", "remote_block_ids"),
        # Facts about the other engine that its own descriptors tell, or that it alone needs.
        *("tp_size", "dcp_size", "pp_size", "transfer_mode", "remote_blocks_expiry_time"),
        *("remote_registration_generation", "remote_prefill_cached_tokens"),
        "prompt_token_ids",  # for vLLM's front end
    }
)
"""The keys that mean something here, or that are known to need no meaning."""
ROUTED = TransferId.routed("x").base.removesuffix("x")
FETCHES = {"kv.fetch", "kv.source_locations"}
"""Actions of ``kv_hint`` that name a source; the second is the former name of the first."""
MAX_SOURCES = 8
"""The most engines that are asked for one request; a hint that names more is cut."""


S = TypeVar("S")


class UnreadableError(IdentityError):
    """What a request says is not of the schema."""


def _of(schema: type[S], value: Any) -> S:
    """Return a value of a schema. A number may be written as a text, as routers do that hold ports as texts."""
    try:
        return msgspec.convert(value, schema, strict=False)
    except (ValueError, *UNREADABLE) as e:
        raise UnreadableError(f"kv_transfer_params: {printable(str(e)[:200])}") from None


# --- what was said -------------------------------------------------------------------------------------------------


class Told(NamedTuple):
    """What P's answer says about the prompt that P was given; what is missing, or of another prompt, is left empty.

    digest: What the KV of that prompt depends on.
    tokens: How many of its tokens P offers.
    facts: The hash of what all of P's KV depends on.
    """

    digest: bytes = b""
    tokens: int = 0
    facts: str = ""


class Hints(NamedTuple):
    """What params say about engines that may hold a prefix."""

    sources: tuple[Address, ...] = ()  # the directories to ask, each once
    kind: str = ""  # the schema that has named the first of them
    notes: tuple[tuple[str, str], ...] = ()  # what cannot be used, by key, and why


NO_VERB = (
    "its kv_transfer_params name an engine, and have neither do_remote_prefill nor do_remote_decode: the router must forward "
    "the prefill engine's params whole"
)


class Said(Struct, frozen=True):
    """What a request's params ask of this engine.

    Attributes:
        offers: The request is to be prefilled here for another engine.
        loads: The request was, or is being, prefilled elsewhere.
        name: The router's name of the transfer; then P may not have begun.
        said: The params in one schema. Of a request that offers, only the router's name is read.
        missing: They look like a prefill engine's answer, and do not say that anything is to be loaded.
        empty: Whether there are none.
    """

    offers: bool = False
    loads: bool = False
    name: str | None = None
    said: Answer = Answer()
    missing: bool = False
    empty: bool = True

    @property
    def answered(self) -> bool:
        """Whether these are P's answer, so that P has computed the prompt."""
        return self.name is None and self.said.kvxfer_transfer is not None

    @property
    def digest(self) -> bytes:
        """The digest that P named; empty if it named none."""
        text = self.said.kvxfer_digest
        try:
            return bytes.fromhex(text) if isinstance(text, str) and len(text) <= 2 * MAX_DIGEST else b""
        except ValueError:
            return b""

    @property
    def answer(self) -> str | None:
        """The name of P's answer, if it has one."""
        name = self.said.remote_request_id
        return name if isinstance(name, str) and 0 < len(name) <= LONGEST else None

    def told(self, external: ExternalId) -> Told:
        """Return what P has said about this prompt. Of a batch, vLLM relays only what P has said about the first."""
        if external.prompt:
            return Told()
        tokens, facts = self.said.remote_num_tokens, self.said.kvxfer_facts
        known = type(tokens) is int and 0 < tokens <= MAX_TOKENS
        return Told(self.digest, tokens if known else 0, facts if isinstance(facts, str) else "")

    def given_up(self, prompt_tokens: int) -> bool:
        """Return whether a router gives up what P's answer tells of: it sends the answer with a prompt of one token, to any engine."""
        return self.loads and prompt_tokens == 1 and bool(self.digest)

    @property
    def wrong_role(self) -> str | None:
        """What is asked of an engine whose ``kv_role`` does not allow it, and what that would have to be; None for nothing."""
        if not (self.offers or self.loads):
            return None
        asked, needed = (
            ("offer its prompt's KV", "kv_producer") if self.offers else ("load its prompt's KV", "kv_consumer")
        )
        return (
            f"asks this engine to {asked}, which its kv_role does not allow: the router sent it to the wrong engine, or "
            f"kv_role must be {needed} or kv_both"
        )

    def offered_id(self, epoch: int, external: ExternalId, digest: bytes) -> TransferId:
        """Return the id under which a prompt is offered: the router's, or else one that this engine makes.

        Clients send one request id for several requests, so the digest is part of the id that this engine makes.

        Raises:
            IdentityError: The router's id is invalid, or the request's id is too long.
        """
        if self.name is not None:
            return TransferId.routed(self.name, external.prompt)
        return TransferId.mint(epoch, content_name(external.base, digest), external.prompt)

    def offer_key(self, transfer: TransferId) -> bytes | None:
        """Return what tells one offer of a transfer from a later one under the same name; None if P has not said."""
        request, content = self.answer, self.said.kvxfer_digest
        if request is None or not isinstance(content, str) or len(content) > LONGEST:
            return None
        named = repr((str(transfer), request, content)).encode(errors="backslashreplace")
        return hashlib.blake2b(named, digest_size=16).digest()

    def wanted(self, external: ExternalId, digest: bytes = b"") -> tuple[TransferId, Source] | str:
        """Return which transfer D is to load and from where, or a text that says what is missing or malformed.

        ``digest`` is that of D's prompt. It names the transfer unless P has named this very prompt, which may turn out to be another.

        Raises:
            IdentityError: The transfer's id is invalid.
        """
        where, said = self._address(), self.said
        if isinstance(where, str):
            return where
        there = Source(where.host, where.port, 0)
        if self.name is not None:
            return TransferId.routed(self.name, external.prompt), there
        if external.prompt and said.kvxfer_alone:
            return "of its list of prompts the prefill engine has offered the first"
        base, epoch = said.kvxfer_transfer, said.kvxfer_epoch
        if base is None and epoch is None and self.answer is not None:
            # P was told nothing, and names what it offers by the request's id, and by its epoch, which its directory knows. The id may be
            # the X-Request-Id itself, or what an engine has made of that.
            made = self.answer.startswith(_KINDS)
            shared = external_id(self.answer).base if made else self.answer
            return TransferId.mint(0, content_name(shared, digest), external.prompt), there
        if base is None or epoch is None:
            return (
                f"{TRANSFER} or {EPOCH} is missing: the router must forward the prefill engine's params whole, or send transfer_id to "
                f"both engines, or {REQUEST}, the X-Request-Id of both, to the decode engine"
            )
        if not base.startswith(ROUTED):  # a router's name is the whole of it
            base = content_name(base, self.told(external).digest or digest)
        try:
            return TransferId(TransferBase(base), external.prompt), Source(where.host, where.port, int(epoch, 16))
        except ValueError:
            return f"{EPOCH} is not a hexadecimal number of up to 63 bits: {describe(epoch)}"

    def _address(self) -> Address | str:
        """Return where P's directory is, or a text that says why it is not known."""
        said = self.said
        if said.kvxfer_address is not None:
            try:
                return _dialled(parse_address(said.kvxfer_address))
            except IdentityError:
                return f"{ADDRESS} is not an address: {describe(said.kvxfer_address)}"
        lacking = [key for key, value in ((HOST, said.remote_host), (PORT, said.remote_port)) if value is None]
        if lacking:
            return (
                f"{' and '.join(lacking)} {'are' if len(lacking) > 1 else 'is'} missing: the router must forward the prefill engine's "
                "params whole, or send the decode engine the host and the port of the prefill engine's directory, its setting 'port'"
            )
        try:
            return _directory(said)
        except IdentityError as e:
            return f"{HOST} and {PORT} do not name a directory: {e}"


def read_params(params: Any) -> Said:
    """Return what a request's ``kv_transfer_params`` ask of this engine, hints left aside (``hints_of``).

    Raises:
        IdentityError: They cannot be read.
    """
    if not isinstance(params, Mapping):
        raise UnreadableError(f"kv_transfer_params is no mapping: {describe(params)}")
    if not params:
        return Said()
    if params.get("remote_decoder") is not None or params.get("remote_prefiller") is not None:
        return _tier(params)
    offers, loads = bool(params.get("do_remote_decode")), bool(params.get("do_remote_prefill"))
    missing = "do_remote_prefill" not in params and any(params.get(key) for key in (TRANSFER, ADDRESS, HOST))
    if not loads:
        name = _name(params.get("transfer_id")) if offers else None
        return Said(offers, False, name, missing=missing, empty=False)
    ours = (
        params.get(ADDRESS) is not None
    )  # then nobody needs what a router may have written over P's own host and port
    said = _of(Answer, {key: value for key, value in params.items() if not (ours and key in (HOST, PORT))})
    if said.remote_port is None and not ours:
        if (port := _of(MoRIIO, params).port) is not None:
            said = msgspec.structs.replace(said, remote_port=port)
        elif (url := _of(Mooncake, params).remote_bootstrap_addr) is not None:
            host, number = _of_url(url)
            said = msgspec.structs.replace(said, remote_host=host, remote_port=number)
    return Said(offers, True, _name(said.transfer_id), said, missing, False)


def _tier(params: Mapping[str, Any]) -> Said:
    """Read the schema of vLLM's peer-to-peer tier."""
    tier = _of(Tier, {key: params.get(key) for key in Tier.__struct_fields__})
    decoder, prefiller = tier.remote_decoder, tier.remote_prefiller
    party = decoder or prefiller
    both = decoder is not None and prefiller is not None
    if both or party is None or not party.kv_request_id:
        what = "both are there" if both else "there is no kv_request_id"
        raise UnreadableError(f"remote_decoder or remote_prefiller must name the transfer, and {what}")
    where = Answer() if prefiller is None else Answer(prefiller.remote_host, prefiller.remote_port)
    return Said(prefiller is None, prefiller is not None, _name(party.kv_request_id), where, empty=False)


def _name(name: Any) -> str | None:
    """Return a router's name of a transfer: a text or, as some write, a number of up to 64 bits; None if there is nothing of it."""
    if not name:
        return None
    number = type(name) is int and -(1 << 63) <= name < 1 << 64  # Python refuses to write out very long ones
    if not number and not (isinstance(name, str) and len(name) <= LONGEST):
        raise UnreadableError(f"transfer_id is not a text of up to {LONGEST} characters: {describe(name)}")
    return str(name)


def _of_url(text: str) -> tuple[str | None, int | None]:
    """Return host and port of a URL, as far as it has them."""
    try:
        found = urlsplit(text if "//" in text else f"//{text}")
        return found.hostname, found.port or None
    except ValueError:
        return None, None


def _directory(where: Where) -> Address:
    """Return the directory that a host and a port name.

    Raises:
        IdentityError: They name none.
    """
    if not where.remote_host or where.remote_port is None:
        raise UnreadableError(f"{HOST} and {PORT} are {describe(where.remote_host)} and {describe(where.remote_port)}")
    return _dialled(Address(canonical_host(where.remote_host), where.remote_port))


def _dialled(where: Address) -> Address:
    """Refuse a name at once: nobody looks up what a request says, so that its load would fail.

    Raises:
        IdentityError: It is a name.
    """
    if not is_ip(where.host) and where.host != "localhost":
        raise UnreadableError(f"{where.host!r} is a name: engines are dialled by address")
    return where


# --- hints ---------------------------------------------------------------------------------------------------------


def hints_of(params: Mapping[str, Any]) -> Hints:
    """Read the hints of a request's ``kv_transfer_params``, as the router sent them: the first source named is its first choice."""
    found: dict[Address, str] = {}  # and who has named it first
    notes = [(key, "is not known") for key, value in params.items() if value is not None and key not in HEARD]
    for key, (kind, reader) in READERS.items():
        try:
            for source in reader(params):
                found.setdefault(source, kind)
        except IdentityError as e:
            notes.append((key, f"names no engine to ask: {e}"))
    if len(found) > MAX_SOURCES:
        notes.append((SOURCES, f"is cut: a request names {MAX_SOURCES} engines at the most, all hints together"))
    return Hints(tuple(found)[:MAX_SOURCES], next(iter(found.values()), ""), tuple(notes))


def _listed(params: Mapping[str, Any]) -> Iterator[Address]:
    """Read ``kvxfer_sources``: a list of directories, each a text ``HOST:PORT``."""
    value = params.get(SOURCES)
    for one in _of(list[Any], [] if value is None else value)[: MAX_SOURCES + 1]:
        yield _dialled(parse_address(_of(Text, one)))


def _tier_source(params: Mapping[str, Any]) -> Iterator[Address]:
    """Read ``remote_kv_source`` of vLLM's peer-to-peer tier."""
    if params.get("remote_kv_source") is not None:
        yield _directory(_of(Where, params["remote_kv_source"]))


def _bidirectional(params: Mapping[str, Any]) -> Iterator[Address]:
    """Read what the decode engine of the last turn answered. The example router replaces its host, but not our own key."""
    if not params.get("do_remote_decode") or params.keys() & OTHERS:  # MoRIIO's tells a prefill engine where to write
        return
    if params.get(ADDRESS) is not None:
        yield _dialled(parse_address(_of(Text, params[ADDRESS])))
    elif params.get(PORT) is not None:  # which other schemas do not give to a prefill engine
        yield _directory(_of(Where, params))


def _dynamo(params: Mapping[str, Any]) -> Iterator[Address]:
    """Read ``kv_hint`` of Dynamo: an envelope of actions, of which ``kv.fetch`` names a ``source_control_endpoint``."""
    if params.get("kv_hint") is None:
        return
    for action in _of(Envelope, params["kv_hint"]).actions[:MAX_SOURCES]:
        kind = action.get("action_type") if isinstance(action, Mapping) else None
        if isinstance(kind, str) and kind in FETCHES:
            endpoint = _of(FetchAction, action).payload.source_control_endpoint
            yield _dialled(parse_address(endpoint.removeprefix("tcp://")))


READERS: dict[str, tuple[str, Callable[[Mapping[str, Any]], Iterator[Address]]]] = {
    SOURCES: (SOURCES, _listed),
    "remote_kv_source": ("remote_kv_source", _tier_source),
    HOST: ("nixl", _bidirectional),
    "kv_hint": ("kv_hint", _dynamo),
}
"""By the key that is at fault if a hint cannot be read: what the hints of a schema are called, and what reads them."""
KEYS = {kind: key for key, (kind, _) in READERS.items()}
"""By what the hints of a schema are called: the key that has them."""
EVERY_S, MAX_SAID = 10.0, 100
"""Seconds from one log line about loads to the next, for each kind of hint; keys of which the log says that they are not used."""


class HintNotes:
    """Reads hints, and says once of each key that it is not used, and why. One thread."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._repeats = Repeats(EVERY_S)

    def read(self, params: Mapping[str, Any]) -> Hints:
        """Return the hints of a request's ``kv_transfer_params``."""
        hints = hints_of(params) if params else Hints()
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


# --- what this engine answers --------------------------------------------------------------------------------------


def content_name(base: str, digest: bytes) -> str:
    """Return the base of a transfer's id for one content."""
    return f"{base}/{digest.hex()}"


def answer(
    ticket: Ticket, engine: str, request: str, tp: int, groups: int, tokens: int, facts: str, alone: bool
) -> dict[str, Any]:
    """Return P's answer, which its router passes to D.

    Args:
        ticket: The offer of the prompt, the first if the request was a batch.
        engine: The engine's name.
        request: The name of the answer (``SchedulerSide.answer``).
        tp: How many ranks share the heads.
        groups: The number of KV-cache groups.
        tokens: How many tokens are offered.
        facts: A hash of what all of P's KV depends on.
        alone: Whether no other prompt of the same HTTP request is offered.
    """
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        **_told_by(ticket.source, engine, request, tp, groups, tokens),
        TRANSFER: ticket.transfer.base.removesuffix("/" + ticket.digest.hex()),
        EPOCH: f"{ticket.source.epoch:x}",
        DIGEST: ticket.digest.hex(),
        FACTS: facts,
        **({ALONE: True} if alone else {}),
    }


def held_answer(source: Source, engine: str, request: str, tp: int, groups: int, tokens: int) -> dict[str, Any]:
    """Return the answer of an engine that has used a prompt's KV: where a prefill engine may ask for it at the next turn.

    These are the keys of NIXL's bidirectional mode. Nothing is offered or held: an engine that asks is told what is there then.
    """
    return {
        "do_remote_prefill": False,
        "do_remote_decode": True,
        **_told_by(source, engine, request, tp, groups, tokens),
        "remote_blocks_expiry_time": None,
    }


def _told_by(source: Source, engine: str, request: str, tp: int, groups: int, tokens: int) -> dict[str, Any]:
    """Return what every answer tells of the engine and of its KV. Some routers check that each group has its row of blocks."""
    return {
        "remote_block_ids": [[] for _ in range(groups)],
        "remote_engine_id": engine,
        REQUEST: request,
        HOST: source.host,
        PORT: source.port,
        TOKENS: tokens,
        "tp_size": tp,
        ADDRESS: str(Address(source.host, source.port)),
    }


# --- vLLM's request ids --------------------------------------------------------------------------------------------

_KINDS = ("cmpl-", "chatcmpl-", "generate-tokens-")
_CHILD = re.compile(r"([0-9]{1,9})_")
_KIND = re.compile(r"(cmpl|chatcmpl|generate-tokens)-")
_SUFFIX = re.compile(r"-[0-9a-f]{8}\Z")
_PROMPT = re.compile(r"(.*)-([0-9]{1,9})\Z", re.DOTALL)

_PREFILL, _DECODE = "___prefill_addr_", "___decode_addr_"


class ExternalId(msgspec.Struct, frozen=True):
    """An engine's request id without what the engine has added.

    base: The id that came from outside, as in an X-Request-Id header.
    prompt: The index within a batched completion, else 0.
    child: The index among n > 1 samples of one prompt; None if there is only one.
    """

    base: str
    prompt: int
    child: int | None


def external_id(internal: str) -> ExternalId:
    """Return what two engines that serve one request agree on, from the id that either engine has given it.

    Removes what vLLM adds, each part at most once, in this order: the child prefix ``<i>_`` (n > 1); the kind of
    request, ``cmpl-``, ``chatcmpl-`` or ``generate-tokens-``; the suffix, ``-`` and eight lower-case hex digits; for
    ``cmpl-``, the prompt index ``-<i>``. The rest is kept as it is.

    Promised: the ids that two engines give one request differ only in the eight digits, so both get the same result,
    whatever the external id looks like. Requests of one kind with different external ids or prompt indices get different
    results, even if the external ids end like a suffix or an index, or begin like a prefix. (The kind itself is dropped,
    so that a completion's prefill may serve a chat.)

    Not promised for an external id that looks as if an engine had made it. The engine may have added no suffix: a request is
    rejected early, or randomisation is turned off. Then the end of a chat's id or of a bare id is taken for one,
    so that ``job-deadbeef`` becomes ``job``. A bare id (offline use) may lose its beginning: ``7_x-86a9ce7b`` becomes
    child 7 of ``x``. Such a request may miss its transfer, or meet another's, which then fails because the digests differ.

    Raises:
        IdentityError: Nothing is left.
    """
    rest, child, prompt = internal, None, 0
    if match := _CHILD.match(rest):
        rest, child = rest[match.end() :], int(match[1])
    kind = _KIND.match(rest)
    if kind:
        rest = rest[kind.end() :]
    rest = _SUFFIX.sub("", rest)
    if kind and kind[1] == "cmpl" and (match := _PROMPT.match(rest)):
        rest, prompt = match[1], int(match[2])
    if not rest:
        raise IdentityError(f"request id {internal!r:.300} has no external part: send a request id of your own")
    return ExternalId(rest, prompt, child)


def may_be_of_batch(internal: str) -> bool:
    """Return whether a request may be one prompt of several: those of a completion, each of which has an index."""
    return _CHILD.sub("", internal, count=1).startswith("cmpl-")


class RoutedAddresses(msgspec.Struct, frozen=True):
    """The addresses that a router has written into an id, as for vLLM's former P2pNcclConnector."""

    prefill: Address
    decode: Address
    uuid: str


def routed_addresses(external: ExternalId) -> RoutedAddresses | None:
    """Read ``___prefill_addr_HOST:PORT___decode_addr_HOST:PORT_UUID``; None for an id without such a marker.

    Nothing ambiguous is accepted: the id must begin with the first marker, and each marker must occur once. The decode
    address ends at the first ``_`` after its marker. An address ends in ``:`` and the port, and what comes before is an
    IPv4 or IPv6 address (bracketed or bare) or a host name, which has no ``_``. The UUID is the text after that ``_``.

    The addresses come from the sender of the request: ask ``kvxfer.identity.allowed`` before dialling one.

    Raises:
        IdentityError: The id has a marker, but is not of this form.
    """
    base = external.base
    if _PREFILL not in base and _DECODE not in base:
        return None
    body = base.removeprefix(_PREFILL)
    prefill, _, rest = body.partition(_DECODE)
    decode, _, uuid = rest.partition("_")
    if body == base or _PREFILL in body or _DECODE in rest or not uuid:
        raise IdentityError(
            f"request id {base!r:.300} does not consist of one prefill address, one decode address and a UUID"
        )
    return RoutedAddresses(parse_address(prefill), parse_address(decode), uuid)


# --- which part of a prompt P has computed -------------------------------------------------------------------------


class CommonPart(NamedTuple):
    """What to load: the digest of it, and how many tokens. 0: none, and a peer that offers this digest may be told so.

    differs: Whether the prompt does not begin with the other one.
    rejected: Whether the front end has rejected the request, and all others of its batch.
    """

    digest: bytes
    tokens: int
    differs: bool = False
    rejected: bool = False


def common_part(
    told: Told, facts: str, *, whole: int, most: int, left: int, content: bytes, digest: Callable[[int], bytes]
) -> CommonPart:
    """Return what to load of a prompt.

    If the facts of the two engines differ, so do all digests; the load is left to fail, and its failure names those facts.

    Args:
        told: What the prefill engine has said about its own prompt; it is taken to be as long as this one if it has not said more.
        facts: The hash of this engine's facts.
        whole: The tokens of this prompt.
        most: How many of them may be loaded.
        left: How many tokens at the end of its prompt the prefill engine leaves out, because it offers a state. A state is of use
            whole only.
        content: The digest of this prompt.
        digest: Returns the digest of its first tokens, given their number.
    """
    length = told.tokens + left if told.tokens else whole
    own = digest(length) if length < whole else content
    same = length <= whole and told.digest in (b"", own)
    if told.digest and not same and told.facts in ("", facts):
        # vLLM's front end replaces a prompt that it refuses by one token.
        return CommonPart(told.digest, 0, differs=whole > 1, rejected=whole == 1)
    if not same:
        length, own = whole, content
    tokens = length - left
    if tokens > most:
        tokens = 0 if left else most
    return CommonPart(own if tokens else told.digest or own, tokens)
