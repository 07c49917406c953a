"""Adds this transfer back end to SGLang: its name on the command line, and the classes behind that name.

SGLang lets plug-ins add names to its command line, but neither values to its enum of transfer back ends nor classes to the
function that maps these to classes. Both are extended here in ways that other plug-ins can use as well: the hook of ``enum`` for
values that are not members, and SGLang's own registry of hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

NAME = "kvxfer"
"""The value of ``--disaggregation-transfer-backend``."""


def plug_in() -> None:
    """Make ``kvxfer`` a transfer back end of SGLang in this process."""
    from sglang.srt.arg_groups.choices import DISAGG_TRANSFER_BACKEND_CHOICES, add_disagg_transfer_backend_choices
    from sglang.srt.disaggregation.utils import TransferBackend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if NAME in DISAGG_TRANSFER_BACKEND_CHOICES:
        return
    add_disagg_transfer_backend_choices([NAME])
    _extend(TransferBackend)
    HookRegistry.register("sglang.srt.disaggregation.utils.get_kv_class", _classes, HookType.AROUND)


def _extend(backends: Any) -> None:
    """Make ``TransferBackend("kvxfer")`` one of SGLang's transfer back ends."""
    ours = object.__new__(backends)
    ours._name_, ours._value_ = NAME.upper(), NAME
    before: Callable[[object], Any] = backends._missing_

    def missing(cls: Any, value: object) -> Any:
        return ours if value == NAME else before(value)

    backends._missing_ = classmethod(missing)


def _classes(original: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:
    """Return the class that SGLang asks for: ours if it asks about this back end."""
    if transfer_backend.value != NAME or class_type.value == "kvargs":
        return original(transfer_backend, class_type)
    from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

    from kvxfer_sglang.manager import TransferManager
    from kvxfer_sglang.requests import TransferReceiver, TransferSender

    return {
        "manager": TransferManager,
        "sender": TransferSender,
        "receiver": TransferReceiver,
        "bootstrap_server": CommonKVBootstrapServer,
    }[class_type.value]
