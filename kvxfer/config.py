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
FilePath = Annotated[str, Meta(min_length=1, pattern=r"^[^\x00]*$", description="without a NUL byte")]
ModelName = Annotated[str, Meta(min_length=1, max_length=MAX_TEXT)]
Integrity = Literal["off", "sample", "full"]

Ask = Literal["auto", "always", "never"]

NAMING = "kvxfer setting {!r}"


class Config(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of one engine.

    Each engine of a pair has its own. The two need not agree, as long as the engines have a back end in common.

    Attributes:
        backend: Name of an installed back end, `module:Class`, or `auto`: each link then uses the first back end, in a fixed order,
            that both engines have and that can make it. Two engines must have a back end in common.
        backend_options: Options of the back end, which checks them itself. With `auto`, the options of each back end under its
            name, as in `{"zmq": {...}}`.
        listen: Address that the control sockets bind to, and the back end's sockets if it has any. With `0.0.0.0` or `::`, set
            `advertise` as well. IPv6 addresses may have brackets.
        port: Port of the engine's directory; 0 takes any free one. With vLLM's data parallelism each rank adds its number.
        advertise: Address that peers get; this engine looks a name up for them. Unset, they get `listen`. With `auto`, each process
            finds its host's own address, and listens there if `listen` is a loopback address.
        transfer_timeout: Time from the first part of a transfer to its outcome, whatever happens. A producer allows a consumer at
            most the longer of its own `lease` and `transfer_timeout`.
        start_timeout: Time from a fetch to its first part, in which the request may queue at a busy producer. Unset, it is as long
            as `transfer_timeout`.
        step_budget: Time of a decode engine's step for waiting for short loads and copying in what they brought, so that their
            requests run in that same step; all loads of a step share it. An engine that has little else to do waits longer,
            where that saves more than it costs. With 0 no request waits.
        lease: Time for which a producer keeps offered blocks that nobody has fetched or renewed.
        control_ports: Ports for the control sockets of an engine's workers, as in `20000-20099`: each worker takes the first that is
            free on its host. Unset, any free port.
        peer_timeout: Silence after which a peer counts as lost while work with it is pending. It ends no transfer whose peer answers. A
            directory that does not answer for as long counts as unreachable.
        abort_timeout: Time that the back end may take to release the memory of an aborted transfer. After that its link is closed,
            and after as long again the back end is replaced, which ends all transfers of that worker. A lower value frees blocks
            sooner; a library that needs longer is then reset without need.
        staging_bytes: Staging memory of each worker, for transfers that cannot or should not go direct. Unset, 64 MiB of host
            memory, or 512 MiB of a CUDA device where the back end moves such memory.
        key_file: Path of the file with the key that this engine presents and those that it accepts; `kvxfer keys FILE` makes one. It
            is read again when it changes. Unset, there is no authentication. It does not encrypt KV: option `encrypt` of `tcp` and
            `zmq` does.
        peers: Networks and addresses that may connect and may be dialled, by back ends as well. Unset, everybody.
        trust_network: Whether you trust every host that can reach this one with the contents of KV and with the engine's memory. If
            so, `auto` also uses `nixl`, `ucx` and `nccl` between hosts, whose ports ask for no secret.
        integrity: With `full`, both sides hash everything that moves, and a transfer whose bytes changed on the way fails. With `sample`,
            a sixteenth of the blocks of each part. If two engines differ, the stricter setting applies.
        layout_check: Whether a connector checks at start that each layer writes its KV where kvxfer would read it, and refuses to start
            otherwise.
        model: A name for the weights in place of their fingerprint: for checkpoints that differ only in form, or that cannot be read.
            Engines with the same name are taken to serve the same weights.
        trace: Path of a file (no pipe or device) to which the scheduler's process appends a line of JSON for each load: what was
            loaded, and when it reached each stage. Unset, nothing is written.
        ask: Whether a prefix of a prompt is loaded from engines that a router names. `auto`: if the load should end before the tokens
            could be computed, by the recent speed of the link and of the engine. `always`: all that they hold. `never`: none of it.
        ask_timeout: Time for which a request waits for the answers of such engines; with `auto`, no longer than computing the tokens
            should take. Then it is computed. A load from an answer must begin within that time, or 0.75 s if that is longer.
        ask_tokens: The fewest tokens that are worth a load from such an engine.
        elastic: Whether pages of the cache may be unmapped and replaced while the engine runs, as kvcached does. Back ends whose
            registration pins pages then move the cache staged. Unset, it is detected, for CUDA memory only.

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
