"""``kv_transfer_params``: NIXL's schema, which routers already relay, with keys of our own.

To P a router sends ``do_remote_decode``; P's answer carries ``do_remote_prefill``, the address of its directory, and
under our keys the transfer's base id and digest, and P's epoch; the router forwards that to D as it is. A router that dispatches
to both at once names the transfer itself: ``transfer_id`` to both, and to D ``remote_host`` and ``remote_port`` of P.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvxfer.engine import Ticket
from kvxfer.identity import Source, TransferId
from kvxfer_vllm.ids import ExternalId

__all__ = ["answer", "digest_of", "is_load", "is_offer", "offered_id", "wanted"]

TRANSFER, EPOCH, DIGEST = "kvxfer_transfer", "kvxfer_epoch", "kvxfer_digest"


def is_offer(params: Mapping[str, Any] | None) -> bool:
    """Whether the request is to be prefilled here for somebody else."""
    return bool(params and params.get("do_remote_decode"))


def is_load(params: Mapping[str, Any] | None) -> bool:
    """Whether the request was prefilled elsewhere."""
    return bool(params and params.get("do_remote_prefill"))


def offered_id(params: Mapping[str, Any], epoch: int, external: ExternalId) -> TransferId:
    """Return the id under which a prompt is offered: the router's, or one of our own."""
    name = params.get("transfer_id")
    return (
        TransferId.routed(str(name), external.prompt)
        if name
        else TransferId.mint(epoch, external.base, external.prompt)
    )


def answer(
    ticket: Ticket, engine: str, request: str, tp: int, table: Sequence[Sequence[int]], tokens: int
) -> dict[str, Any]:
    """Return what P answers, for its router to give to D."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(row) for row in table],
        "remote_engine_id": engine,
        "remote_request_id": request,
        "remote_host": ticket.source.host,
        "remote_port": ticket.source.port,
        "remote_num_tokens": tokens,
        "tp_size": tp,
        TRANSFER: ticket.transfer.base,
        EPOCH: f"{ticket.source.epoch:x}",
        DIGEST: ticket.digest.hex(),
    }


def digest_of(params: Mapping[str, Any]) -> bytes:
    """Return the digest that P named; empty if it did not, or not so that it can be read."""
    try:
        return bytes.fromhex(params.get(DIGEST) or "")
    except (TypeError, ValueError):
        return b""


def wanted(params: Mapping[str, Any], external: ExternalId) -> tuple[TransferId, Source] | str:
    """Which transfer D is to load and from where, or what is missing or malformed."""
    host, port = params.get("remote_host"), params.get("remote_port")
    if not isinstance(host, str) or not host or not isinstance(port, int) or not 0 < port < 65536:
        return f"remote_host and remote_port do not name a directory ({host!r}, {port!r})"
    name = params.get("transfer_id")
    if name:
        return TransferId.routed(str(name), external.prompt), Source(host, port, 0)
    base, epoch = params.get(TRANSFER), params.get(EPOCH)
    if not isinstance(base, str) or not isinstance(epoch, str):
        return f"{TRANSFER} or {EPOCH} is missing: the router must forward the prefill engine's params whole"
    try:
        return TransferId(base, external.prompt), Source(host, port, int(epoch, 16))
    except ValueError:
        return f"{EPOCH} is not a hexadecimal number: {epoch!r}"
