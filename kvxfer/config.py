"""What an operator can set: few keys, each checked before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self

import msgspec
from msgspec import Meta, Struct

from kvxfer.facts import MAX_TEXT
from kvxfer.identity import canonical_host
from kvxfer.settings import (
    AUTO_ADDRESS,
    bare,
    check_dialable,
    hold,
    loopback,
    named,
    own_address,
    port_range,
    told_address,
)

SLOTS, MIN_PIECE = 4, 4096
"""The slots into which staging memory is cut. They are enough to overlap packing, moving and unpacking. They are few, because a piece
costs the host as much time whatever its length: half a millisecond in a virtual machine, in which NVLink moves 190 MB. Each is a multiple
of the second number of bytes, which is also the least that a peer may ask for: shorter pieces would cost too much work."""

Port = Annotated[int, Meta(ge=0, le=65535)]
Seconds = Annotated[float, Meta(gt=0, le=86400, title="seconds")]  # bounded, so that every wait ends
Budget = Annotated[float, Meta(ge=0, le=1, title="seconds")]
Staging = Annotated[int, Meta(ge=SLOTS * MIN_PIECE, title="bytes")]
NonEmpty = Annotated[str, Meta(min_length=1)]
FilePath = Annotated[str, Meta(min_length=1, pattern=r"^[^\x00]*$")]
ModelName = Annotated[str, Meta(min_length=1, max_length=MAX_TEXT)]
Integrity = Literal["off", "sample", "full"]

Ask = Literal["auto", "always", "never"]

NAMING = "kvxfer setting {!r}"


class Config(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of one engine.

    Each engine of a pair has its own. The two need not agree, as long as the engines have a back end in common.

    Attributes:
        backend: A name from the entry point group `kvxfer.backends`, or `module:Class`, or `auto`: each link then uses the
            first back end, in a fixed order, that both engines have and that can make it (see `kvxfer.transport.auto`).
        backend_options: Handed to the back end, which checks them itself; with `auto`, a mapping from back end to options.
        listen: Address that control sockets bind to; an IPv6 one with or without brackets.
        port: Port of the engine's directory; 0 takes any free one.
        advertise: Address given to peers, or a name that this host looks up for them. None gives them `listen`; `auto` lets each
            process find its host's own address, and listen there if `listen` is a loopback address.
        transfer_timeout: Seconds that a transfer may take from its first part to its outcome.
        start_timeout: Seconds that a consumer waits for the first part, in which the request may queue at the producer. None
            means as long as `transfer_timeout`.
        step_budget: Seconds that one engine step may spend waiting for short loads and copying in what they brought, so
            that their requests run in that same step. A load counts as short if both should fit, judging by the recent
            speed of its link and of the copies. An engine that has little else to do waits longer. 0 turns this off.
        lease: Seconds for which a producer keeps offered blocks that nobody fetches or renews.
        control_ports: Ports for the control sockets of this host's workers, as in `20000-20099`: each worker takes the first that is
            free. None takes any free port.
        peer_timeout: Seconds of silence after which a peer counts as dead. It ends no transfer whose peer answers.
        abort_timeout: Seconds that the back end may take to let go of an aborted transfer's memory; after that the link is closed,
            and after as many again the back end is replaced.
        staging_bytes: Size of the staging area, for transfers that cannot or should not go direct; None takes 64 MiB of
            host memory, or 512 MiB of a CUDA device where the back end moves such memory.
        key_file: Path of the file with the key that this engine presents and those that it accepts (`kvxfer keys` makes one);
            None for no authentication. It is read again when it changes.
        peers: Who may connect to this engine and whom it may dial: networks and addresses; None for everybody.
        trust_network: Whether you trust every host that can reach this one with the contents of KV and with the engine's memory. Then
            `auto` also uses back ends between hosts whose ports ask for no secret, as those for RDMA do.
        integrity: How much of what arrives is compared with a hash of what was sent: nothing, a sixteenth of each
            part's blocks, or all. If two engines differ, the stricter setting applies.
        layout_check: Whether a connector checks at start that its engine writes KV where kvxfer would read it, and
            refuses to start otherwise.
        model: A name for the weights, used instead of what the engine finds out about them: for checkpoints that differ only
            in form, or that cannot be read. Two engines with the same name are taken to serve the same model.
        trace: Path of a file to which the scheduler's process appends a line of JSON for each load that ends: what was
            loaded, and when each stage was reached. None writes nothing.
        ask: Whether a prefix of a prompt is loaded from engines that a router names. `auto`: if the load should end before the tokens
            could be computed, by the recent speed of the link and of the engine. `always`: whatever they hold. `never`: nobody is asked.
        ask_timeout: Seconds for which a request waits for the answers of such engines.
        ask_tokens: The fewest tokens that are worth a load from such an engine.
        elastic: Whether pages of the cache may be unmapped and replaced while the engine runs, as kvcached does. Back
            ends whose registration pins pages then move the cache staged. None detects it for CUDA memory, by how that is
            mapped.

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
    lease: Seconds = 30.0
    control_ports: NonEmpty | None = None
    peer_timeout: Seconds = 10.0
    abort_timeout: Seconds = 10.0
    staging_bytes: Staging | None = None
    key_file: FilePath | None = None
    peers: tuple[NonEmpty, ...] | None = None
    trust_network: bool = False
    integrity: Integrity = "off"
    layout_check: bool = True
    model: ModelName | None = None
    trace: FilePath | None = None
    ask: Ask = "auto"
    ask_timeout: Seconds = 0.25
    ask_tokens: Annotated[int, Meta(ge=1, title="tokens")] = 16
    elastic: bool | None = None

    def __post_init__(self) -> None:
        hold(self, NAMING)
        msgspec.structs.force_setattr(self, "listen", bare(self.listen))
        check_dialable(self.listen, self.advertise, NAMING)
        port_range(self.control_ports, NAMING.format("control_ports"))
        if self.advertise is not None:
            msgspec.structs.force_setattr(self, "advertise", canonical_host(self.advertise))

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Read settings as they come out of JSON, YAML or an engine's own configuration.

        Raises:
            ConfigError: A key is unknown (the message names the nearest known one) or a value has the wrong type or
                range (the message names key, value and what is expected).
        """
        return cls(**named(cls, mapping, NAMING))

    @classmethod
    def misfits(cls, mapping: Mapping[str, Any]) -> list[str]:
        """Return what an engine's connector touches and the installed engine no longer has, given the engine's own configuration."""
        return []

    @classmethod
    def unwrapped(cls, mapping: dict[str, Any]) -> dict[str, Any]:
        """Return the settings inside an option of an engine that holds them; any other mapping unchanged. A connector overrides this.

        Raises:
            ConfigError: The option names another connector.
        """
        return mapping

    @property
    def start(self) -> float:
        """The longest time from a fetch to its first part, in seconds."""
        return self.transfer_timeout if self.start_timeout is None else self.start_timeout

    @property
    def longest(self) -> float:
        """The longest time from a fetch to its outcome, in seconds."""
        return self.start + self.transfer_timeout

    @property
    def told(self) -> str:
        """The address at which peers dial this engine.

        Raises:
            ConfigError: ``advertise`` is a name that leads nowhere.
        """
        return told_address(self.listen, self.advertise, NAMING)

    def located(self, find: Callable[[], str] = own_address) -> Self:
        """Return these settings with this host's address in place of `advertise` = `auto`.

        Raises:
            ConfigError: This host's address cannot be found.
        """
        if self.advertise != AUTO_ADDRESS:
            return self
        here = find()
        return msgspec.structs.replace(self, advertise=here, listen=here if loopback(self.listen) else self.listen)
