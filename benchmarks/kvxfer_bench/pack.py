"""``kvxfer bench pack``: packing into one long message and unpacking from it, compared with a plain copy."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from kvxfer.cli.devices import check_device
from kvxfer.errors import ConfigError
from kvxfer.memory import devices_of

__all__ = ["pack"]


def pack(
    device: Annotated[str, typer.Option(help="Device of the cache: cpu or cuda:N.")] = "cpu",
    mib: Annotated[
        list[int] | None, typer.Option(min=2, help="MiB of KV to move; may be repeated. [default: 64, 256]")
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Number of rounds; the median counts.")] = 9,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """Time packing, unpacking and checksums of scattered blocks between layouts, and compare them with a plain torch copy.

    A layout's name lists its axes from the outermost in: L layer, B block, N token, H head; C stands for K and V side by side,
    D for one of them, and 2 for the axis that separates them. Figures are in GB/s (1e9 bytes of KV). What was unpacked is
    compared with what was packed, and the program fails if any of it differs.
    """
    check_device(device, "--device")
    _check_here(device)
    from kvxfer_bench.packing import rows

    identical = True
    for found in rows(device, mib or [64, 256], repeat):
        typer.echo(json.dumps(found) if as_json else _words(found))
        identical &= found["bytes_identical"]
    if not identical:
        raise typer.Exit(1)


def _check_here(device: str) -> None:
    kind = device.partition(":")[0]
    here = devices_of(kind)
    if device not in here:
        raise ConfigError(f"--device {device}: {', '.join(here) or f'no device of kind {kind}'} is here")


def _words(found: dict[str, Any]) -> str:
    lines = [
        f"{found['producer']}->{found['consumer']} {found['heads']} heads, {found['mib']} MiB, rows "
        f"{found['row_bytes']} B{'' if found['bytes_identical'] else '  BYTES DIFFER'}"
    ]
    for name in ("copy", "pack", "unpack", "checksum", "pack_to_host", "unpack_from_host"):
        if f"{name}_GB_per_s" in found:
            ratio, submit = found.get(f"{name}_of_copy"), found.get(f"{name}_submit_us")
            lines.append(
                f"   {name:17}{found[f'{name}_GB_per_s']:9.1f} GB/s"
                + ("" if ratio is None else f"  {ratio:5.2f} of copy")
                + ("" if submit is None else f"  submit {submit:6.1f} us")
            )
    return "\n".join(lines)
