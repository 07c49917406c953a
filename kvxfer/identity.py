"""What two engines must name alike: transfers, addresses, epochs and digests."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import sys
from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import TYPE_CHECKING, Any, NewType

import msgspec
import numpy as np

from kvxfer import arguments
from kvxfer.errors import ArgumentError

if TYPE_CHECKING:
    from numpy.typing import NDArray  # for annotations alone it takes too long to load

Generation = NewType("Generation", int)
"""Counts how often an engine gave up blocks and offered again; meaningful only together with an epoch."""

FIRST, LAST = Generation(0), Generation(sys.maxsize)
"""No generation is before the first, and none after the last."""

TransferBase = NewType("TransferBase", str)
"""The name that the prompts of one request share on both sides: its origin, and what that has called it."""

Handle = NewType("Handle", str)
"""An engine's own name of a fetch or of an offer. No other engine hears of it, and a later one may have it again."""

RequestId = NewType("RequestId", str)
"""An engine's own name of a request. No other engine hears of it, and a later request may have it again."""

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_PORT = re.compile(r"[0-9]{1,5}")
_QUESTION = re.compile(r"ask/[0-9a-f]{32}")
_OWN, _ANY = "own/", f"own/{0:016x}/"
_PLACE = len(_ANY) - 1
"""Where the name begins in an id that a producer has made, behind its epoch."""
_MAX_EMBEDS = 1 << 20
_LONGEST = 1 << 14
"""The most characters of a transfer's name."""


class IdentityError(ArgumentError):
    """An id, or an ingredient of a digest, is invalid: no transfer may be made from it."""


class TransferId(msgspec.Struct, frozen=True, gc=False, order=True, cache_hash=True):
    """The name of the KV of one prompt of one request, the same on both sides. Opaque.

    Make one with `derived`, `routed`, `mint` or `asked`. No two of these ever make the same id, because `base` begins with its origin.
    """

    base: TransferBase
    prompt: int

    def __post_init__(self) -> None:
        if not isinstance(self.base, str) or len(self.base) > _LONGEST:
            raise IdentityError(f"id {self.base!r:.60} is not a text of up to {_LONGEST} characters")
        if not self.base.isascii():
            try:
                self.base.encode()
            except UnicodeEncodeError as error:
                raise IdentityError(f"id {self.base!r:.60} is not valid Unicode: fix what sent it") from error
        if type(self.prompt) is not int or not 0 <= self.prompt <= arguments.MAX_INTEGER:
            msgspec.structs.force_setattr(self, "prompt", arguments.integer("prompt", self.prompt, 0))

    @classmethod
    def derived(cls, base: str, prompt: int = 0) -> TransferId:
        """Make one from an id that the router gave both sides. The samples of a request with ``n > 1`` share it."""
        return cls(TransferBase(f"ext/{_named('base', base)}"), prompt)

    @classmethod
    def routed(cls, name: str, prompt: int = 0) -> TransferId:
        """Make one from a name that the router minted for one HTTP request; ``prompt`` is the index of a prompt in its batch."""
        return cls(TransferBase(f"router/{_named('name', name)}"), prompt)

    @classmethod
    def mint(cls, epoch: int, base: str, prompt: int = 0) -> TransferId:
        """Make one at a producer, from its epoch and its own name for the request; the consumer has to be told the result.

        A retry under the same name gets the same id; another producer never makes it. A consumer that does not know the epoch, but
        the name, takes epoch 0, and learns the rest from the producer's directory (`of`).
        """
        number = arguments.integer("epoch", epoch, 0)
        return cls(TransferBase(f"own/{number:016x}/{_named('base', base)}"), prompt)

    @classmethod
    def asked(cls) -> TransferId:
        """Make one for what one engine may offer in answer to a question. It is random: nobody can ask under it before."""
        return cls(TransferBase(f"ask/{secrets.token_hex(16)}"), 0)

    @property
    def is_asked(self) -> bool:
        """Whether it has the form of `asked`. Under no other name is a question answered."""
        return self.prompt == 0 and _QUESTION.fullmatch(self.base) is not None

    @property
    def nbytes(self) -> int:
        """The memory that the name takes, at the most: a peer chooses it."""
        return len(self.base) * (1 if self.base.isascii() else 4)

    @property
    def brief(self) -> bytes:
        """Sixteen bytes that no other id has, for tables that peers fill: its name may be long."""
        return hashlib.blake2b(str(self).encode(), digest_size=16).digest()

    def of(self, epoch: int) -> TransferId:
        """Return what the producer of this epoch calls it, if this was made for epoch 0, which no producer has; else itself."""
        return self._with(epoch) if self.unplaced else self

    @property
    def unplaced(self) -> bool:
        """Whether it was made for epoch 0: only the producer's directory can say what it is called there."""
        return self.base.startswith(_ANY)

    @property
    def anywhere(self) -> TransferId:
        """What a consumer calls it that does not know the producer's epoch."""
        return self._with(0) if self.base.startswith(_OWN) else self

    def _with(self, epoch: int) -> TransferId:
        return TransferId(TransferBase(f"{_OWN}{epoch:016x}{self.base[_PLACE:]}"), self.prompt)

    def __str__(self) -> str:
        return f"{self.base}#{self.prompt}"


class Address(msgspec.Struct, frozen=True, order=True):
    """Where an engine listens: ``host`` is an IP address in canonical form, or a lower-case host name."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Source(msgspec.Struct, frozen=True):
    """Where an engine is reached: the address of its directory, and the epoch that must answer there (`new_epoch`).

    Raises:
        ArgumentError: An argument has the wrong type or range, or `host` is neither an IP address nor a host name.
    """

    host: str
    port: int
    epoch: int

    def __post_init__(self) -> None:
        canonical_host(arguments.string("host", self.host))
        for name, least, most in (("port", 1, 65535), ("epoch", 0, arguments.MAX_INTEGER)):
            checked = arguments.integer(name, getattr(self, name), least, most)
            msgspec.structs.force_setattr(self, name, checked)

    def __str__(self) -> str:
        return str(Address(self.host, self.port))


def parse_address(text: str) -> Address:
    """Read `HOST:PORT`, where HOST is IPv4, IPv6 in brackets or bare, or a host name.

    Raises:
        IdentityError: ``text`` has no such form.
    """
    where, _, port = text.rpartition(":")
    if not _PORT.fullmatch(port) or not 0 < int(port) < 65536:
        raise IdentityError(f"address {text!r} does not end in a port")
    return Address(canonical_host(where), int(port))


def allowed(address: Address, allow_list: Iterable[str]) -> bool:
    """Return whether the operator's allow-list covers an address.

    An entry is an IP network (`10.0.0.0/8`, `fd00::/8`), an address or host name (any port), or either of the latter with a
    port (`10.0.0.7:14579`, `[fd00::7]:14579`). Names are compared as names, never resolved. An empty list
    allows none.

    Raises:
        IdentityError: An entry is none of these.
    """
    # All of them, so that a bad entry behind a match is found.
    verdicts = [_permits(entry.strip(), address) for entry in allow_list]
    return any(verdicts)


def new_epoch() -> int:
    """Return 63 random bits that number the life of one process, so that peers can tell it from its predecessor."""
    return int.from_bytes(os.urandom(8)) >> 1


def digest(
    *,
    tokens: Sequence[int] | NDArray[Any] | None,
    model: str,
    media: Sequence[tuple[str, int, int]] = (),
    lora: str | int | None = None,
    salt: str | None = None,
    embeds: bytes | None = None,
) -> bytes:
    """Return 16 bytes that are equal on two engines only if both mean the same KV.

    Args:
        tokens: The ids of the tokens to be transferred; None if the prompt came as embeddings alone.
        model: The model's identity: its name, revision, and whatever else its KV depends on.
        media: For each multimodal item a hash of what its encoder gets, first position and length in tokens, in order.
        lora: A hash of the adapter's weights and scaling. A name or number will not do: what it stands for may change.
        salt: The request's cache salt.
        embeds: A hash of the prompt embeddings.

    Raises:
        ArgumentError: An argument has the wrong type, or is text that is not valid Unicode.
    """
    arguments.string("model", model, empty=True)
    if salt is not None:
        arguments.instance("salt", salt, str)
    if embeds is not None:
        arguments.bytes_of("embeds", embeds, _MAX_EMBEDS, empty=True)
    ids = None if tokens is None else as_token_ids(tokens).tobytes()
    items = media_items(media)
    return hashlib.blake2b(key(ids, model, items, lora, salt, embeds), digest_size=16).digest()


def media_items(media: Sequence[tuple[str, int, int]]) -> tuple[tuple[str, int, int], ...]:
    """Return the hash, the first position and the length in tokens of each multimodal item.

    Raises:
        ArgumentError: They are something else, or a position or a length is negative.
    """
    try:
        items = tuple((str(content), int(first), int(length)) for content, first, length in media)
    except (TypeError, ValueError):
        items = None
    if items is None or any(first < 0 or length < 0 for _, first, length in items):
        what = "a negative one" if items is not None else arguments.describe(media)
        raise ArgumentError(f"media must be (hash, position, length) for each item, not {what}")
    return items


def key(*parts: Any) -> bytes:
    """Encode names and numbers (str, bytes, int, None, TransferId, tuples of these) as bytes.

    Different parts, or a different number of them, never give the same bytes, whatever characters they hold.

    Raises:
        IdentityError: A part has another type, or is an integer beyond 64 bits or text that is not valid Unicode.
    """
    try:
        return msgspec.msgpack.encode(_plain(parts))
    except (OverflowError, UnicodeEncodeError) as error:
        raise IdentityError(f"{parts!r} cannot be made a key: {error}") from error


def _plain(part: object) -> object:
    """Return a part in a form that msgpack tells from every other: only a TransferId becomes a map."""
    match part:
        case TransferId():
            return {part.base: part.prompt}
        case tuple():
            return tuple(_plain(item) for item in part)
        case None | int() | str() | bytes():
            return part
    raise IdentityError(f"a {type(part).__name__} cannot be part of a key")


def as_token_ids(tokens: Sequence[int] | NDArray[Any]) -> NDArray[np.int64]:
    """Return token ids in eight bytes each, little-endian, whatever sequence and integer type they come in.

    Raises:
        IdentityError: They are no row of integers of up to 63 bits.
    """
    return token_row(tokens).astype("<i8")


def token_row(tokens: Sequence[int] | NDArray[Any]) -> NDArray[Any]:
    """Return token ids as an array of the integer type in which they come.

    Raises:
        IdentityError: They are no row of integers of up to 63 bits.
    """
    try:
        if len(tokens) == 0:
            return np.empty(0, "<i8")
        ids = np.asarray(_quickly(tokens))
    except (TypeError, ValueError):  # no sequence, or rows of several lengths
        raise IdentityError(f"token ids must be a row of integers, not {arguments.describe(tokens)}") from None
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or (ids.dtype.str[1:] == "u8" and int(ids.max()) >> 63):
        raise IdentityError(f"token ids must be a row of integers, not {ids.dtype} of shape {ids.shape}")
    return ids


def _quickly(tokens: Sequence[int] | NDArray[Any]) -> Sequence[int] | NDArray[Any]:
    """Return a list of token ids as an array, in a fourth of the time that numpy takes; anything else unchanged."""
    if type(tokens) is not list or type(tokens[0]) is not int:
        return tokens
    try:
        return np.frombuffer(array("I", tokens), np.uintc)
    except (TypeError, OverflowError):
        return tokens  # numpy will judge these


def _named(argument: str, value: str) -> str:
    if not isinstance(value, str) or not value:
        raise IdentityError(f"{argument} must be a str that is not empty, not {arguments.describe(value)}")
    return value


@lru_cache(1024)
def canonical_host(text: str) -> str:
    """Return the canonical form of a host. Numbers that resolvers take for addresses (`127.1`, `0x7f000001`) are refused.

    Raises:
        IdentityError: ``text`` is neither an IP address nor a host name.
    """
    bracketed = text.startswith("[") and text.endswith("]")
    bare = text[1:-1] if bracketed else text
    try:
        address: IPv4Address | IPv6Address = ip_address(bare)
    except ValueError:
        name = text.lower()
        if _NAME.fullmatch(name) and len(name) < 254 and not _NUMBER.fullmatch(name.rpartition(".")[2]):
            return name
        raise IdentityError(f"host {text!r:.300} is neither an IP address nor a host name") from None
    if "%" in bare or (bracketed and address.version == 4):
        raise IdentityError(f"host {text!r:.300} is neither an IP address nor a host name")
    return str(address)


def _permits(entry: str, address: Address) -> bool:
    if "/" in entry:
        try:
            network = ip_network(entry)
        except ValueError as error:
            raise IdentityError(f"allow-list entry {entry!r} is not a network: {error}") from error
        return is_ip(address.host) and ip_address(address.host) in network
    if is_ip(entry) or ":" not in entry or entry.endswith("]"):
        return canonical_host(entry) == address.host
    return parse_address(entry) == address


def is_ip(text: str) -> bool:
    """Return whether ``text`` is an IP address, of version 4 or 6, rather than a name."""
    try:
        ip_address(text)
    except ValueError:
        return False
    return True
