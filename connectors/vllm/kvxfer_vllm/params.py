"""``kv_transfer_params``: NIXL's schema, which routers already relay, with keys of our own.

To P a router sends ``do_remote_decode``; P's answer carries ``do_remote_prefill``, the address of its directory, and
under our keys that address again, the transfer's base id and digest, and P's epoch; the router forwards that to D as it is. Some
routers overwrite ``remote_host`` with where they reach P's HTTP server, which need not be where this rank is, so the address
under our key is preferred. A router that dispatches to both at once names the transfer itself: ``transfer_id`` to both, and
to D ``remote_host`` and ``remote_port`` of P. llm-d's ``offloading`` says the same in the schema of vLLM's peer-to-peer tier,
``remote_decoder`` and ``remote_prefiller``, which ``translated`` puts into these words.

What comes in is anybody's: it is bounded before it is used or shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvxfer.arguments import shown
from kvxfer.engine import Ticket
from kvxfer.identity import Address, IdentityError, Source, TransferId, parse_address
from kvxfer_vllm.ids import ExternalId

__all__ = ["answer", "digest_of", "is_load", "is_offer", "is_routed", "offered_id", "translated", "wanted"]

TRANSFER, EPOCH, DIGEST, ADDRESS = "kvxfer_transfer", "kvxfer_epoch", "kvxfer_digest", "kvxfer_address"
LONGEST = 4096
"""Characters of a text in params; a request id of vLLM's stays far below."""


def translated(params: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return params that name the other party as a whole in our own words; all others as they are.

    To P such a router sends ``remote_decoder`` with the transfer's name, to D ``remote_prefiller`` with that and P's address.

    Raises:
        IdentityError: Neither party can be told by it, or both are there.
    """
    named = [key for key in ("remote_decoder", "remote_prefiller") if params.get(key) is not None]
    if not named:
        return params
    (party, *more) = named
    said = params[party]
    if more or not isinstance(said, Mapping) or not said.get("kv_request_id"):
        what = "both are there" if more else f"{party} has no kv_request_id: {shown(said)}"
        raise IdentityError(f"remote_decoder or remote_prefiller must name the transfer, and {what}")
    if party == "remote_decoder":
        return {"do_remote_decode": True, "transfer_id": said["kv_request_id"]}
    where = {key: said.get(key) for key in ("remote_host", "remote_port")}
    return {"do_remote_prefill": True, "transfer_id": said["kv_request_id"], **where}


def is_offer(params: Mapping[str, Any] | None) -> bool:
    """Whether the request is to be prefilled here for somebody else."""
    return bool(params and params.get("do_remote_decode"))


def is_load(params: Mapping[str, Any] | None) -> bool:
    """Whether the request was prefilled elsewhere."""
    return bool(params and params.get("do_remote_prefill"))


def is_routed(params: Mapping[str, Any]) -> bool:
    """Whether the router has named the transfer, so that P may not have begun with it."""
    return bool(params.get("transfer_id"))


def offered_id(params: Mapping[str, Any], epoch: int, external: ExternalId) -> TransferId:
    """Return the id under which a prompt is offered: the router's, or one of our own.

    Raises:
        IdentityError: The router's is none, or the request's id is too long.
    """
    name = params.get("transfer_id")
    return _routed(name, external) if name else TransferId.mint(epoch, external.base, external.prompt)


def answer(ticket: Ticket, engine: str, request: str, tp: int, groups: int, tokens: int) -> dict[str, Any]:
    """Return what P answers, for its router to give to D.

    Blocks are no router's business, nor the consumer's: ``remote_block_ids`` is there, with an empty row for each group, for
    those who look whether it is.
    """
    source = ticket.source
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[] for _ in range(groups)],
        "remote_engine_id": engine,
        "remote_request_id": request,
        "remote_host": source.host,
        "remote_port": source.port,
        "remote_num_tokens": tokens,
        "tp_size": tp,
        TRANSFER: ticket.transfer.base,
        ADDRESS: str(Address(source.host, source.port)),
        EPOCH: f"{source.epoch:x}",
        DIGEST: ticket.digest.hex(),
    }


def digest_of(params: Mapping[str, Any]) -> bytes:
    """Return the digest that P named; empty if it did not, or not so that it can be read."""
    text = params.get(DIGEST)
    try:
        return bytes.fromhex(text) if isinstance(text, str) and len(text) <= LONGEST else b""
    except ValueError:
        return b""


def wanted(params: Mapping[str, Any], external: ExternalId) -> tuple[TransferId, Source] | str:
    """Which transfer D is to load and from where, or what is missing or malformed.

    Raises:
        IdentityError: An id or an address is none.
    """
    where = _address(params)
    if isinstance(where, str):
        return where
    name = params.get("transfer_id")
    if name:
        return _routed(name, external), Source(where.host, where.port, 0)
    base, epoch = params.get(TRANSFER), params.get(EPOCH)
    if not isinstance(base, str) or not isinstance(epoch, str):
        return f"{TRANSFER} or {EPOCH} is missing: the router must forward the prefill engine's params whole"
    if len(base) > LONGEST:
        return f"{TRANSFER} has {len(base)} characters, more than {LONGEST}: {shown(base)}"
    try:
        return TransferId(base, external.prompt), Source(where.host, where.port, int(epoch[:LONGEST], 16))
    except ValueError:
        return f"{EPOCH} is no hexadecimal number of up to 63 bits: {shown(epoch)}"


def _routed(name: object, external: ExternalId) -> TransferId:
    """Return what a router names by a text or, since some count, by a number of up to 64 bits."""
    number = isinstance(name, int) and -(1 << 63) <= name < 1 << 64  # Python refuses to write out very long ones
    if not number and not (isinstance(name, str) and len(name) <= LONGEST):
        raise IdentityError(f"transfer_id is no text of up to {LONGEST} characters: {shown(name)}")
    return TransferId.routed(str(name), external.prompt)


def _address(params: Mapping[str, Any]) -> Address | str:
    """Return where P's directory is, or why that cannot be said."""
    ours = params.get(ADDRESS)
    if ours is not None:
        try:
            if not isinstance(ours, str) or len(ours) > LONGEST:
                raise IdentityError("no text of a sensible length")
            return parse_address(ours)
        except IdentityError:
            return f"{ADDRESS} is no address: {shown(ours)}"
    host, port = params.get("remote_host"), params.get("remote_port")
    if isinstance(host, str) and 0 < len(host) <= LONGEST and isinstance(port, int) and 0 < port < 65536:
        return Address(host, port)
    return f"remote_host and remote_port do not name a directory ({shown(host)}, {shown(port)})"
