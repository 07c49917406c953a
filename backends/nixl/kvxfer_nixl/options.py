"""The options a user may give this back end, checked before anything starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

import msgspec
from msgspec import Meta

from kvxfer.backend.options import BackendOptions
from kvxfer.backend.ucx import Split, confined, split
from kvxfer.errors import ConfigError
from kvxfer_nixl.carriers import copies_directly, in_force
from kvxfer_nixl.library import has_gpu

Setting = str | int | float | bool

UCX_DEFAULTS = {
    "MM_ERROR_HANDLING": "y"  # or UCX refuses to make do with shared memory
}
"""What we set unless the operator does, in the options or with ``UCX_*`` in the environment."""

GPU_DEFAULTS = {
    # Without NVLink UCX has the peer copy what is read from its GPU, through host memory, at 0.2 GB/s. If the peer dies meanwhile, this
    # side's worker never comes to rest, and its other peers wait with it.
    "CUDA_IPC_ENABLE_GET_ZCOPY": "y"
}
"""The same where there is a GPU. UCX knows these settings only where it has loaded CUDA."""


class Options(BackendOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``backend_options`` of back end ``nixl``.

    Attributes:
        listen: Where plugin `UCX` opens ports. Unset, at the engine's `listen`. With a loopback address nowhere: it then uses only
            shared memory and GPUs. With another address, on the network device that has it; with `0.0.0.0`, on all devices.
        plugin: NIXL plugin that moves the bytes; one that reaches other agents: `UCX`, `LIBFABRIC` (EFA, needs libfabric on the host),
            `MOONCAKE` (built from source).
        plugin_params: The plugin's own parameters, as in `{"num_workers": "2"}`.
        ucx: Settings of UCX, with or without the prefix `UCX_`, as in `{"TLS": "rc,cuda_ipc", "NET_DEVICES": "mlx5_0:1"}`. They take
            precedence over the environment.
        verbs: Verbs to use. Unset, writes, and reads unless UCX has only TCP; then a link that only TCP can make is refused. Verbs
            that are named here are used without these checks.
        threads: Threads that post a large batch of host memory, each with a worker of plugin `UCX`. Unset, two, or one if there is
            a GPU, whose transfers a second worker slows down.
        num_threads: Extra threads with which the plugin posts long batches. They spin while they work.
        sync_mode: Locking inside the NIXL agent. Unset, what `threads` needs.
        log_level: What NIXL's library writes to stderr; it is read once in a process, when NIXL is loaded. Unset, `NIXL_LOG_LEVEL`
            of the environment decides.
    """

    backend = "nixl"

    listen: Annotated[str, Meta(min_length=1)] = "127.0.0.1"
    plugin: Annotated[str, Meta(min_length=1)] = "UCX"
    plugin_params: dict[str, Setting] = {}
    ucx: dict[str, Setting] = {}
    verbs: Annotated[frozenset[Literal["read", "write"]], Meta(min_length=1)] | None = None
    threads: Annotated[int, Meta(ge=1, le=4)] | None = None
    num_threads: Annotated[int, Meta(ge=0, le=256)] = 0
    sync_mode: Literal["none", "rw", "strict"] | None = None
    log_level: Literal["TRACE", "DEBUG", "INFO", "WARN", "ERROR", "FATAL"] | None = None

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> Self:
        parsed = super().parse(options)
        parsed = msgspec.structs.replace(parsed, plugin=parsed.plugin.upper())
        if parsed.ucx and parsed.plugin != "UCX":
            raise ConfigError(
                f"option 'ucx' of back end 'nixl' is for plugin 'UCX', and the plugin is {parsed.plugin!r}"
            )
        if parsed.posting > 1 and parsed.plugin != "UCX":
            raise ConfigError(f"option 'threads' of back end 'nixl' does nothing for plugin {parsed.plugin!r}")
        if parsed.posting > 1 and parsed.sync_mode == "none":
            raise ConfigError("option 'sync_mode' of back end 'nixl' can be 'none' only if option 'threads' is 1")
        return parsed

    @property
    def posting(self) -> int:
        """``threads``, chosen if it was not set."""
        return self.threads or (1 if has_gpu() or self.plugin != "UCX" or self.sync_mode == "none" else 2)

    @property
    def locking(self) -> Literal["none", "rw", "strict"]:
        """``sync_mode``, chosen if it was not set."""
        return self.sync_mode or ("none" if self.posting == 1 else "rw")

    @property
    def given_settings(self) -> dict[str, str]:
        """``ucx``, without the prefix, as text."""
        return {key.removeprefix("UCX_"): text(value) for key, value in self.ucx.items()}

    @property
    def ucx_settings(self) -> dict[str, str]:
        """Without the prefix, as text: the options, and our defaults where neither they nor the environment say otherwise.

        Raises:
            ConfigError: ``listen`` is no address of this host.
        """
        if self.plugin != "UCX":
            return {}
        given, gpus = self.given_settings, has_gpu()
        ours = UCX_DEFAULTS | (GPU_DEFAULTS if gpus else {}) | confined(self.listen, given, gpus=gpus)
        ours["KEEPALIVE_INTERVAL"] = _keepalive(in_force(ours | given, "TLS"))
        return {key: value for key, value in ours.items() if f"UCX_{key}" not in os.environ} | given

    @property
    def contexts(self) -> Split:
        """``ucx_settings``, for a context with shared memory and for one with networks.

        Raises:
            ConfigError: As ``ucx_settings`` does.
        """
        if self.plugin != "UCX":
            return Split(None, {})
        chosen = split(self.ucx_settings, gpus=has_gpu())
        decided = {key.removeprefix("UCX_") for key in (*self.ucx, *os.environ)}
        if "KEEPALIVE_INTERVAL" not in decided:
            for settings in (chosen.host, chosen.network):
                if settings is not None:
                    settings["KEEPALIVE_INTERVAL"] = _keepalive(in_force(settings, "TLS"))
        return chosen


def _keepalive(carriers: str) -> str:
    """Choose how often UCX asks whether peers are there, for this setting of ``TLS``.

    Its first round comes while the first peer is being connected. If that peer goes just then, UCX (1.23) sends by a connection over
    shared memory that it could not make, and crashes. So there is none where it is not needed: a peer on this host that ends is
    noticed by ``Liveness``, TCP has a keepalive of its own, and what UCX copies by itself is never left half done. What it has the
    peer copy is, and then nothing else tells it of the peer's death; its own default is 20 s.
    """
    return "inf" if copies_directly(carriers) else "1s"


def text(value: Setting) -> str:
    """Return a setting as UCX and NIXL read it."""
    return {True: "y", False: "n"}[value] if isinstance(value, bool) else str(value)
