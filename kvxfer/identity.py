"""Names that two engines agree on: transfers, addresses in old ids, epochs, digests, keys."""

import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from kvxfer.errors import KvxferError

# Counts how often an engine gave up blocks and offered anew; means something together with an epoch only.
Generation: TypeAlias = int

_CHILD = re.compile(r"([0-9]{1,9})_")
_KIND = re.compile(r"(cmpl|chatcmpl|generate-tokens)-")
_SUFFIX = re.compile(r"-[0-9a-f]{8}\Z")
_PROMPT = re.compile(r"(.*)-([0-9]{1,9})\Z", re.DOTALL)

_PREFILL, _DECODE = "___prefill_addr_", "___decode_addr_"
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_PORT = re.compile(r"[0-9]{1,5}")


class IdentityError(KvxferError):
    """An id or an ingredient of a digest cannot be used: no transfer may be made from it."""


class External(msgspec.Struct, frozen=True):
    """An engine's request id without what the engine added.

    base: the id that came from outside (an X-Request-Id header, say).
    prompt: index within a batched completion, else 0.
    child: index among n > 1 samples of one prompt; None if there is only one.
    """

    base: str
    prompt: int
    child: int | None


class TransferId(msgspec.Struct, frozen=True, order=True):
    """Names the KV of one prompt of one request, the same on both sides. Opaque.

    Made by one of the constructors, whose results never equal another's: `base` begins with the name's
    origin.
    """

    base: str
    prompt: int

    def __post_init__(self) -> None:
        try:
            self.base.encode()
        except UnicodeEncodeError as error:
            raise IdentityError(f"id {self.base!r} is not valid Unicode: fix what sent it") from error

    @classmethod
    def derived(cls, external: External) -> "TransferId":
        """From an id that the router gave both sides. Children of n > 1 share it."""
        return cls("ext/" + external.base, external.prompt)

    @classmethod
    def routed(cls, name: str, external: External) -> "TransferId":
        """From a name that the router minted for one HTTP request; `external` tells a batch's prompts
        apart."""
        return cls("router/" + name, external.prompt)

    @classmethod
    def mint(cls, epoch: int, external: External) -> "TransferId":
        """By a producer, from its epoch and its own view of the request, for a consumer that is told the
        result.

        Children of n > 1, and a retry under the same external id, share it; other producers never have it.
        """
        return cls(f"own/{epoch:016x}/{external.base}", external.prompt)

    def __str__(self) -> str:
        return f"{self.base}#{self.prompt}"


def external_id(internal: str) -> External:
    """What two engines that serve one request agree on, from the id that either gave it.

    Undoes what vLLM adds, each at most once, in this order: the child prefix `<i>_` (n > 1); the kind of
    request, `cmpl-`, `chatcmpl-` or `generate-tokens-`; the suffix, `-` and eight lower-case hex digits; for
    `cmpl-`, the prompt index `-<i>`. What is left is taken as it is.

    Promised: the ids of one request differ between engines only in the eight digits, and so do both get the
    same result, whatever the external id looks like. Requests of one kind with different external ids or
    prompts get different ones, though these ids end like a suffix or an index, or begin like a prefix. (The
    kind itself is dropped, so that a completion's prefill may serve a chat.)

    Not promised, for an external id that looks as if an engine had made it: where the engine added no suffix
    (a request rejected early, or randomisation turned off), the end of a chat's or bare id is taken for one,
    and `job-deadbeef` becomes `job`; a bare id (offline use) may lose its beginning, and `7_x-86a9ce7b` is
    child 7 of `x`. Such a request may miss its transfer or meet another's, which its digest then fails.

    Raises:
        IdentityError: nothing is left.
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
        raise IdentityError(f"request id {internal!r} has no external part: send a request id of your own")
    return External(rest, prompt, child)


class Address(msgspec.Struct, frozen=True, order=True):
    """Where an engine listens. host: an IP address in its canonical form, or a lower-case host name."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Source(msgspec.Struct, frozen=True):
    """An engine as others reach it: its directory's address, and the epoch that must answer there (`new_epoch`)."""

    host: str
    port: int
    epoch: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Legacy(msgspec.Struct, frozen=True):
    """The addresses that a router wrote into an id, in the manner of vLLM's former P2pNcclConnector."""

    prefill: Address
    decode: Address
    uuid: str


def legacy(external: External) -> Legacy | None:
    """Read `___prefill_addr_HOST:PORT___decode_addr_HOST:PORT_UUID`; None for an id without such a marker.

    One rule, which nothing ambiguous passes: the id begins with the first marker and each marker occurs once;
    the decode address ends at the first `_` behind its marker; an address ends in `:` and the port, and the
    rest is an IPv4 or IPv6 address (bracketed or bare) or a host name, which has no `_`. The UUID is any
    other text.

    The addresses come from whoever sent the request: ask `allowed` before dialling one.

    Raises:
        IdentityError: the id has a marker and is not of this form.
    """
    base = external.base
    if _PREFILL not in base and _DECODE not in base:
        return None
    body = base.removeprefix(_PREFILL)
    prefill, _, rest = body.partition(_DECODE)
    decode, _, uuid = rest.partition("_")
    if body == base or _PREFILL in body or _DECODE in rest or not uuid:
        raise IdentityError(f"request id {base!r} is not one prefill address, one decode address and a UUID")
    return Legacy(parse_address(prefill), parse_address(decode), uuid)


def parse_address(text: str) -> Address:
    """`HOST:PORT`, where HOST is IPv4, IPv6 in brackets or bare, or a host name. IdentityError if it is
    not."""
    host, _, port = text.rpartition(":")
    if not _PORT.fullmatch(port) or not 0 < int(port) < 65536:
        raise IdentityError(f"address {text!r} does not end in a port")
    return Address(_host(host), int(port))


def allowed(address: Address, allow_list: Iterable[str]) -> bool:
    """Whether the operator lets us dial an address that came with a request.

    Entries: an IP network (`10.0.0.0/8`, `fd00::/8`), an address or host name (any port), or either with a
    port (`10.0.0.7:14579`, `[fd00::7]:14579`). Names are compared as names, never resolved. An empty list
    allows none.

    Raises:
        IdentityError: an entry is none of these.
    """
    verdicts = [_permits(entry.strip(), address) for entry in allow_list]  # all, so that no bad entry hides
    return any(verdicts)


def new_epoch() -> int:
    """A number for the life of one process, 63 random bits: its peers tell it from its predecessor by it."""
    return int.from_bytes(os.urandom(8)) >> 1


def digest(
    *,
    tokens: Sequence[int] | npt.NDArray[Any] | None,
    model: str,
    media: Sequence[tuple[str, int, int]] = (),
    lora: str | int | None = None,
    salt: str | None = None,
    embeds: bytes | None = None,
) -> bytes:
    """16 bytes that two engines share only if they mean the same KV.

    Args:
        tokens: token ids of the tokens to be transferred; None if the prompt came as embeddings alone.
        model: identity of the model: name, revision, whatever makes its KV.
        media: per multimodal item its content hash, first position and length in tokens, in order.
        lora: the adapter, by name; by number only if both engines number their adapters alike.
        salt: the request's cache salt.
        embeds: a hash of prompt embeddings.

    Raises:
        IdentityError: token ids that are not integers, or text that is not valid Unicode.
    """
    ids = None if tokens is None else _token_bytes(tokens)
    items = tuple((str(content), int(first), int(length)) for content, first, length in media)
    return hashlib.blake2b(key(ids, model, items, lora, salt, embeds), digest_size=16).digest()


def key(*parts: Any) -> bytes:
    """Bytes for a tuple of names and numbers (str, bytes, int, None, TransferId, tuples of these).

    Injective: different parts, or a different number of them, never share a key, whatever characters they
        hold.

    Raises:
        IdentityError: a part is of another type, an integer beyond 64 bits, or text that is not valid
            Unicode.
    """
    try:
        return msgspec.msgpack.encode(_plain(parts))
    except (OverflowError, UnicodeEncodeError) as error:
        raise IdentityError(f"{parts!r} cannot be made a key: {error}") from error


def _plain(part: object) -> object:
    """What msgpack keeps apart: a TransferId becomes a map, as nothing else does."""
    match part:
        case TransferId():
            return {part.base: part.prompt}
        case tuple():
            return tuple(_plain(item) for item in part)
        case None | int() | str() | bytes():
            return part
    raise IdentityError(f"a {type(part).__name__} cannot be part of a key")


def _token_bytes(tokens: Sequence[int] | npt.NDArray[Any]) -> bytes:
    """Eight bytes a token, whatever sequence and integer type they come in."""
    if len(tokens) == 0:
        return b""
    array = np.asarray(tokens)
    if array.ndim != 1 or array.dtype.kind not in "iu" or int(array.max()) > np.iinfo(np.int64).max:
        raise IdentityError(f"token ids must be a row of integers, not {array.dtype} of shape {array.shape}")
    return array.astype("<i8").tobytes()


def _host(text: str) -> str:
    """The one form of a host; a number in disguise (`127.1`, `0x7f000001`), which resolvers accept, is
    none."""
    bracketed = text.startswith("[") and text.endswith("]")
    bare = text[1:-1] if bracketed else text
    try:
        address: IPv4Address | IPv6Address = ip_address(bare)
    except ValueError:
        name = text.lower()
        if _NAME.fullmatch(name) and len(name) < 254 and not _NUMBER.fullmatch(name.rpartition(".")[2]):
            return name
        raise IdentityError(f"{text!r} is neither an IP address nor a host name") from None
    if "%" in bare or (bracketed and address.version == 4):
        raise IdentityError(f"{text!r} is neither an IP address nor a host name")
    return str(address)


def _permits(entry: str, address: Address) -> bool:
    if "/" in entry:
        try:
            network = ip_network(entry)
        except ValueError as error:
            raise IdentityError(f"allow-list entry {entry!r} is not a network: {error}") from error
        return is_ip(address.host) and ip_address(address.host) in network
    if is_ip(entry) or ":" not in entry or entry.endswith("]"):
        return _host(entry) == address.host
    return parse_address(entry) == address


def is_ip(text: str) -> bool:
    """Whether it is an address, of version 4 or 6, and no name."""
    try:
        ip_address(text)
    except ValueError:
        return False
    return True
