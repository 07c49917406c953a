"""What things have been found to cost on a link, as figures for people and for JSON."""

from __future__ import annotations

from collections.abc import Mapping

from kvxfer.protocol.cost import LinkCost


def figures(cost: LinkCost | None) -> dict[str, float]:
    """Return what has been measured, in microseconds, and in picoseconds for a byte; nothing of what has not."""
    if cost is None:
        return {}
    staged = cost.alone is not None or cost.among is not None
    found = {
        "part_us": (cost.part, 1e6),
        "descriptor_us": (cost.descriptor, 1e6),
        "piece_us": (cost.piece if staged else None, 1e6),
        "byte_ps": (cost.byte, 1e12),
        "packed_alone_ps": (cost.alone, 1e12),
        "packed_among_ps": (cost.among, 1e12),
    }
    return {name: float(f"{seconds * unit:.3g}") for name, (seconds, unit) in found.items() if seconds is not None}


def in_words(found: Mapping[str, float]) -> str:
    """Return these figures as a line of text."""
    if not found:
        return "nothing measured yet, so first guesses hold"
    return ", ".join(
        f"{name.rpartition('_')[0].replace('_', ' ')} {value:g} {name[-2:]}" for name, value in found.items()
    )
