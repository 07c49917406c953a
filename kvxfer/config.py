"""What an operator can set: few keys, each checked before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self

import msgspec
from msgspec import Meta, Struct

from kvxfer import identity
from kvxfer.errors import ConfigError
from kvxfer.facts import TEXT
from kvxfer.settings import AUTO_ADDRESS, check_dialable, hold, loopback, own_address, read

Port = Annotated[int, Meta(ge=0, le=65535)]
Seconds = Annotated[float, Meta(gt=0, le=86400)]  # bounded: no wait is without an end
Budget = Annotated[float, Meta(ge=0, le=1)]
Bytes = Annotated[int, Meta(gt=0)]
NonEmpty = Annotated[str, Meta(min_length=1)]
ModelName = Annotated[str, Meta(min_length=1, max_length=TEXT)]
Integrity = Literal["off", "sample", "full"]

NAMING = "kvxfer setting {!r}"


class Config(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of one engine.

    Both engines of a pair have their own. These need not agree, as long as the engines have a back end in common.

    Attributes:
        backend: Name under the entry point group `kvxfer.backends`, or `module:Class`, or `auto`: for each link the
            first of a stated order that both engines have and that can make it (see `kvxfer.transport.auto`).
        backend_options: Handed to the back end, which checks them itself; with `auto`, options by back end.
        listen: Address that control sockets bind to.
        port: Port of the engine's directory; 0 takes any free one.
        advertise: Host name or address given to peers; None gives them `listen`; `auto` the address that each process finds
            for itself, on which it then listens in place of a loopback address.
        transfer_timeout: Seconds from the first part of a transfer to its outcome.
        start_timeout: Seconds from a consumer's fetch to the first part, for which its producer may let the request wait; None:
            as long as `transfer_timeout`.
        step_budget: Seconds of one engine step that may be spent on waiting for short loads and on copying what they
            brought, so that their requests run in that step. A load is short if both should take no longer, by what
            its link and the copies have shown of late. 0: never.
        lease: Seconds for which a producer keeps blocks that it offered and nobody fetched or renewed.
        peer_timeout: Seconds of silence after which a peer counts as dead.
        staging_bytes: Size of the staging area, for transfers that cannot or should not go direct; None takes 64 MiB of
            host memory, or 512 MiB of a CUDA device where the back end moves such memory.
        key_file: Path of the key that all engines of a deployment share (`kvxfer keys` makes one); None for no
            authentication.
        peers: Who may connect and be dialled: networks, addresses, host names; None for everybody.
        integrity: How much of what arrives is compared with a hash of what was sent: nothing, a sixteenth of each
            part's blocks, or all. If two engines differ, the stricter setting applies.
        layout_check: Whether a connector compares at start where its engine writes KV with where kvxfer would read it,
            and refuses to start when they differ.
        model: A name for the weights, in place of what the engine finds out about them. Two engines of one name are
            taken to serve the same model. For checkpoints that differ in form only, or that cannot be read. None lets
            the engine find out.
        trace: Path of a file to which the scheduler's process appends a line of JSON for each load that ends: what it was,
            and when it came how far. None writes nothing.
        elastic: Whether pages of the cache may be unmapped and replaced while the engine runs, as kvcached does. Back
            ends whose registration keeps pages then move it staged. None finds out for CUDA memory, by how it is mapped.

    Raises:
        ConfigError: A value has the wrong type or range; the message names setting, value and what is expected.
    """

    backend: NonEmpty = "tcp"
    backend_options: dict[str, Any] = {}
    listen: NonEmpty = "127.0.0.1"
    port: Port = 0
    advertise: NonEmpty | None = None
    transfer_timeout: Seconds = 30.0
    start_timeout: Seconds | None = None
    step_budget: Budget = 0.005
    lease: Seconds = 60.0
    peer_timeout: Seconds = 10.0
    staging_bytes: Bytes | None = None
    key_file: NonEmpty | None = None
    peers: tuple[NonEmpty, ...] | None = None
    integrity: Integrity = "off"
    layout_check: bool = True
    model: ModelName | None = None
    trace: NonEmpty | None = None
    elastic: bool | None = None

    def __post_init__(self) -> None:
        hold(self, NAMING)
        check_dialable(self.listen, self.advertise, NAMING)
        if self.advertise is not None:
            try:
                identity.canonical_host(self.advertise)
            except identity.IdentityError as e:
                raise ConfigError(f"{NAMING.format('advertise')}: {e}; peers could not dial it") from None

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Read settings as they come out of JSON, YAML or an engine's own configuration.

        Raises:
            ConfigError: A key is unknown (the message names the nearest known one) or a value has the wrong type or
                range (the message names key, value and what is expected).
        """
        return read(cls, mapping, NAMING)

    @property
    def start(self) -> float:
        """Seconds from a fetch to its first part, at the most."""
        return self.transfer_timeout if self.start_timeout is None else self.start_timeout

    @property
    def longest(self) -> float:
        """Seconds from a fetch to its outcome, at the most."""
        return self.start + self.transfer_timeout

    def located(self, find: Callable[[], str] = own_address) -> Self:
        """Return these settings as they are for this process, with an address in place of `auto`.

        Args:
            find: Finds this host's own address.

        Raises:
            ConfigError: It cannot be found.
        """
        if self.advertise != AUTO_ADDRESS:
            return self
        here = find()
        return msgspec.structs.replace(self, advertise=here, listen=here if loopback(self.listen) else self.listen)
