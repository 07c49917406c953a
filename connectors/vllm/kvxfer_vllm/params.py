"""``kv_transfer_params``: NIXL's schema, which routers already relay, with keys of kvxfer's own.

P is the prefill engine, D the decode engine. A router sends ``do_remote_decode`` to P. P's answer has ``do_remote_prefill``, the
address of its directory, and under kvxfer's keys that address again, the transfer's base id and digest, P's epoch and a hash of
its facts; the router forwards it to D unchanged. Some routers overwrite ``remote_host`` with the address of P's HTTP server, which
this rank may not share, so the address under kvxfer's key takes precedence. A router that sends to both at once names the
transfer itself, and tells D where P is, in one of several schemas (``schemas.py``).

The input is untrusted: its length is bounded before it is used or shown.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvxfer.arguments import describe
from kvxfer.engine import Ticket
from kvxfer.identity import Address, IdentityError, Source, TransferBase, TransferId, parse_address
from kvxfer.values import MAX_DIGEST, MAX_TOKENS
from kvxfer_vllm.ids import ExternalId
from kvxfer_vllm.schemas import HOST, PORT, directory, request_name

__all__ = [
    "NO_VERB",
    "OURS",
    "Told",
    "answer",
    "answer_of",
    "content_name",
    "digest_of",
    "held_answer",
    "is_answer",
    "is_given_up",
    "is_load",
    "is_offer",
    "is_routed",
    "offer_key",
    "offered_id",
    "says_nothing",
    "told_of",
    "wanted",
]

TRANSFER, EPOCH, DIGEST, ADDRESS = "kvxfer_transfer", "kvxfer_epoch", "kvxfer_digest", "kvxfer_address"
FACTS, TOKENS, REQUEST = "kvxfer_facts", "remote_num_tokens", "remote_request_id"
ALONE = "kvxfer_alone"
ROUTED = TransferId.routed("x").base.removesuffix("x")
OURS = frozenset({TRANSFER, EPOCH, DIGEST, ADDRESS, FACTS, ALONE})
"""Keys of kvxfer's own."""
LONGEST = 4096
"""Characters that a text in params may have; vLLM's request ids are far shorter."""


def is_offer(params: Mapping[str, Any] | None) -> bool:
    """Return whether the request is to be prefilled here for another engine."""
    return bool(params and params.get("do_remote_decode"))


def is_load(params: Mapping[str, Any] | None) -> bool:
    """Return whether the request was, or is being, prefilled elsewhere."""
    return bool(params and params.get("do_remote_prefill"))


def is_routed(params: Mapping[str, Any]) -> bool:
    """Return whether the router has named the transfer, so that P may not have started on it yet."""
    return bool(params.get("transfer_id"))


def is_answer(params: Mapping[str, Any]) -> bool:
    """Return whether these are P's answer, so that P has computed the prompt."""
    return not is_routed(params) and params.get(TRANSFER) is not None


def offered_id(params: Mapping[str, Any], epoch: int, external: ExternalId, digest: bytes) -> TransferId:
    """Return the id under which a prompt is offered: the router's, or else one that this engine makes.

    Clients send one request id for several requests, so the digest is part of the id that this engine makes.

    Raises:
        IdentityError: The router's id is invalid, or the request's id is too long.
    """
    name = params.get("transfer_id")
    return (
        _routed(name, external)
        if name
        else TransferId.mint(epoch, content_name(external.base, digest), external.prompt)
    )


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


def digest_of(params: Mapping[str, Any]) -> bytes:
    """Return the digest that P named; empty if it is missing or unreadable."""
    text = params.get(DIGEST)
    try:
        return bytes.fromhex(text) if isinstance(text, str) and len(text) <= 2 * MAX_DIGEST else b""
    except ValueError:
        return b""


class Told(NamedTuple):
    """What P's answer says about the prompt that P was given; what is missing, unreadable or of another prompt is left empty.

    digest: What the KV of that prompt depends on.
    tokens: How many of its tokens P offers.
    facts: The hash of what all of P's KV depends on.
    """

    digest: bytes = b""
    tokens: int = 0
    facts: str = ""


def told_of(params: Mapping[str, Any], external: ExternalId) -> Told:
    """Return what P has said about this prompt. Of a batch, vLLM relays only what P has said about the first."""
    if external.prompt:
        return Told()
    tokens, facts = params.get(TOKENS), params.get(FACTS)
    return Told(
        digest_of(params),
        tokens if type(tokens) is int and 0 < tokens <= MAX_TOKENS else 0,
        facts if isinstance(facts, str) and len(facts) <= LONGEST else "",
    )


def offer_key(params: Mapping[str, Any], transfer: TransferId) -> bytes | None:
    """Return what tells one offer of a transfer from a later one under the same name; None if P has not said."""
    request, content = params.get(REQUEST), params.get(DIGEST)
    if not (isinstance(request, str) and isinstance(content, str) and len(request) + len(content) <= LONGEST):
        return None
    return hashlib.blake2b(
        repr((str(transfer), request, content)).encode(errors="backslashreplace"), digest_size=16
    ).digest()


def is_given_up(params: Mapping[str, Any], prompt_tokens: int) -> bool:
    """Return whether a router gives up what P's answer tells of: it sends the answer with a prompt of one token, to any engine."""
    return is_load(params) and prompt_tokens == 1 and bool(digest_of(params))


def wrong_role(params: Mapping[str, Any]) -> str | None:
    """Return what params ask of an engine whose ``kv_role`` does not allow it, and what that would have to be; None for nothing."""
    asked = "offer its prompt's KV" if is_offer(params) else "load its prompt's KV" if is_load(params) else None
    needed = "kv_producer" if is_offer(params) else "kv_consumer"
    return asked and (
        f"asks this engine to {asked}, which its kv_role does not allow: the router sent it to the wrong engine, or "
        f"kv_role must be {needed} or kv_both"
    )


NO_VERB = (
    "its kv_transfer_params name an engine, and have neither do_remote_prefill nor do_remote_decode: the router must forward "
    "the prefill engine's params whole"
)


def says_nothing(params: Mapping[str, Any]) -> bool:
    """Return whether params look like a prefill engine's answer, and do not say that anything is to be loaded."""
    return "do_remote_prefill" not in params and any(params.get(key) for key in (TRANSFER, ADDRESS, "remote_host"))


def answer_of(params: Mapping[str, Any]) -> str | None:
    """Return the name of P's answer, if it has one."""
    name = params.get(REQUEST)
    return name if isinstance(name, str) and 0 < len(name) <= LONGEST else None


def wanted(params: Mapping[str, Any], external: ExternalId, digest: bytes = b"") -> tuple[TransferId, Source] | str:
    """Return which transfer D is to load and from where, or a text that says what is missing or malformed.

    ``digest`` is that of D's prompt. It names the transfer unless P has named this very prompt, which may turn out to be another.

    Raises:
        IdentityError: The transfer's id is invalid.
    """
    where = _address(params)
    if isinstance(where, str):
        return where
    name = params.get("transfer_id")
    if name:
        return _routed(name, external), Source(where.host, where.port, 0)
    base, epoch = params.get(TRANSFER), params.get(EPOCH)
    if external.prompt and params.get(ALONE):
        return "of its list of prompts the prefill engine has offered the first"
    if base is None and epoch is None and (shared := request_name(params.get(REQUEST))) is not None:
        # P was told nothing, and names what it offers by the request's id, and by its epoch, which its directory knows.
        return TransferId.mint(0, content_name(shared, digest), external.prompt), Source(where.host, where.port, 0)
    if not isinstance(base, str) or not isinstance(epoch, str):
        return (
            f"{TRANSFER} or {EPOCH} is missing: the router must forward the prefill engine's params whole, or send transfer_id to both "
            f"engines, or {REQUEST}, the X-Request-Id of both, to the decode engine"
        )
    if len(base) > LONGEST:
        return f"{TRANSFER} has {len(base)} characters, more than {LONGEST}: {describe(base)}"
    try:
        named = told_of(params, external).digest or digest
        if not base.startswith(ROUTED):  # a router's name is the whole of it
            base = content_name(base, named)
        return TransferId(TransferBase(base), external.prompt), Source(where.host, where.port, int(epoch[:LONGEST], 16))
    except ValueError:
        return f"{EPOCH} is not a hexadecimal number of up to 63 bits: {describe(epoch)}"


def _routed(name: object, external: ExternalId) -> TransferId:
    """Return the transfer that a router names by a text or, as some do, by a number of up to 64 bits."""
    number = isinstance(name, int) and -(1 << 63) <= name < 1 << 64  # Python refuses to write out very long ones
    if not number and not (isinstance(name, str) and len(name) <= LONGEST):
        raise IdentityError(f"transfer_id is not a text of up to {LONGEST} characters: {describe(name)}")
    return TransferId.routed(str(name), external.prompt)


def _address(params: Mapping[str, Any]) -> Address | str:
    """Return where P's directory is, or a text that says why it is not known."""
    ours = params.get(ADDRESS)
    if ours is not None:
        try:
            if not isinstance(ours, str) or len(ours) > LONGEST:
                raise IdentityError("no text of a sensible length")
            return parse_address(ours)
        except IdentityError:
            return f"{ADDRESS} is not an address: {describe(ours)}"
    host, port = params.get(HOST), params.get(PORT)
    if (found := directory(host, port)) is not None:
        return found
    lacking = [key for key, value in ((HOST, host), (PORT, port)) if value is None]
    if lacking:
        return (
            f"{' and '.join(lacking)} {'are' if len(lacking) > 1 else 'is'} missing: the router must forward the prefill engine's params "
            f"whole, or send the decode engine the host and the port of the prefill engine's directory, its setting 'port'"
        )
    return f"{HOST} and {PORT} do not name a directory ({describe(host)}, {describe(port)})"
