"""The back end's options, and the settings of UCX among them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta

from kvxfer.backend.options import BackendOptions, Period
from kvxfer.backend.ucx import Split, confined, split
from kvxfer.errors import ConfigError, TransportError
from kvxfer.settings import near
from kvxfer_ucx import cuda
from kvxfer_ucx.library import Library

UCX_DEFAULTS = {
    # Endpoints that report errors do not use shared memory unless told that it is fit for that; TCP instead.
    "MM_ERROR_HANDLING": "y",
    # UCX's own default, which ucxx lowers to 1; 2 doubles the speed of TCP.
    "MAX_RNDV_RAILS": "2",
    # Longer messages by rendezvous, so that an eager one always fits one packet: a receiver that waits for the
    # second packet of a dead peer cannot be cancelled.
    "RNDV_THRESH": "8192",
    # The receiver fetches. A sender that writes into its GPU's memory would go on after the receiver has given the message up,
    # if it was stopped meanwhile.
    "RNDV_SCHEME": "get_zcopy",
    # Over shared memory nothing else tells that a peer has died; UCX's own default is 20 s.
    "KEEPALIVE_INTERVAL": "1s",
}
"""What we set unless the operator does, in the options or with ``UCX_*`` in the environment."""


class Options(BackendOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``backend_options`` of back end ``ucx``.

    Attributes:
        listen: Where UCX opens ports. Unset, at the engine's `listen`. With a loopback address nowhere: it then uses only shared
            memory and GPUs. With another address, on the network device that has it; with `0.0.0.0`, on all devices.
        ports: TCP ports to use, as in `20000-20999`; each link takes one for each device. Unset, any free port.
        connect_timeout_s: Time after which a link that is not made yet counts as failed.
        ucx: Settings of UCX without the prefix `UCX_`, as in `{"TLS": "tcp", "NET_DEVICES": "eth0"}`. They take precedence over the
            environment.
    """

    backend = "ucx"

    listen: Annotated[str, Meta(min_length=1)] = "127.0.0.1"
    ports: Annotated[str, Meta(pattern=r"^\d{1,5}-\d{1,5}$", description="as in '20000-20999'")] | None = None
    connect_timeout_s: Period = 10.0
    ucx: dict[str, str | int | float | bool] = {}

    def given(self) -> dict[str, str]:
        """Return the settings of UCX in the options, as text."""
        return {k: _text(v) for k, v in self.ucx.items()}

    def settings(self) -> dict[str, str]:
        """Return what to tell UCX: the options, and our defaults where neither they nor the environment say otherwise.

        Raises:
            ConfigError: ``listen`` is no address of this host.
        """
        given = self.given()
        ours = UCX_DEFAULTS | confined(self.listen, given, gpus=cuda.devices() > 0)
        if self.ports is not None:
            ours["TCP_PORT_RANGE"] = self.ports
        return {k: v for k, v in ours.items() if f"UCX_{k}" not in os.environ} | given

    def split(self) -> Split:
        """Return ``settings``, for a context with shared memory and for one with networks.

        Raises:
            ConfigError: As ``settings`` does.
        """
        return split(self.settings(), gpus=cuda.devices() > 0)


def make_context(library: Library, options: Options, settings: Mapping[str, str]) -> Any:
    """Return a UCX context with these settings, which are what has become of the options.

    Raises:
        ConfigError: A setting that UCX does not take, and ``TransportError`` when it cannot start for another
            reason.
    """
    ucxx = library.ucxx
    # No more than we use: what is off can neither be sent to us nor pile up here.
    features = (ucxx.Feature.TAG, ucxx.Feature.STREAM, ucxx.Feature.WAKEUP)
    try:
        return ucxx.UCXContext(dict(settings), features)
    except ucxx.UCXError as e:
        for key, value in options.ucx.items():
            try:
                ucxx.UCXContext({key: _text(value)})
            except ucxx.UCXInvalidParamError:
                known = [*ucxx.get_current_options(), *UCX_DEFAULTS]
                if key in known:
                    raise ConfigError(f"UCX does not take {value!r} for its setting {key!r}") from None
                hint = near(key, known) or "see `ucx_info -c`, without the prefix UCX_"
                raise ConfigError(f"UCX has no setting {key!r}: {hint}") from None
            except ucxx.UCXError as single:
                raise TransportError(f"UCX cannot start with {key!r} set to {value!r}: {single}") from None
        raise TransportError(f"UCX cannot start: {e}; its settings are {settings}") from e


def _text(value: str | int | float | bool) -> str:
    return {True: "y", False: "n"}[value] if isinstance(value, bool) else str(value)
