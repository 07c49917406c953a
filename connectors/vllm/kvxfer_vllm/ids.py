"""What vLLM's request ids consist of: an id from outside, what vLLM has added to it, and perhaps addresses that a router wrote."""

from __future__ import annotations

import re

import msgspec

from kvxfer.identity import Address, IdentityError, parse_address

__all__ = ["ExternalId", "RoutedAddresses", "external_id", "may_be_of_batch", "routed_addresses"]

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
