"""Read kvxfer's metrics from a page in Prometheus's text format, as engines' HTTP servers have it."""

from __future__ import annotations

import math
import re
from collections import defaultdict

__all__ = ["Samples", "read_samples"]

# Ray exports the metrics of all engines of a host on one page, each name with its own in front.
_SAMPLE = re.compile(r"(?:ray_)?(?P<name>kvxfer_\w+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

_BEYOND = 1e21
"""What no count or time of an engine's reaches, and whose sums are finite."""

Samples = dict[str, list[tuple[dict[str, str], float]]]


def read_samples(page: str) -> Samples:
    """Return the samples of kvxfer on a page, without those that are no number, or one that no engine reaches."""
    out: Samples = defaultdict(list)
    for line in page.splitlines():
        if (found := _SAMPLE.match(line)) and abs(value := _number(found["value"])) < _BEYOND:
            out[found["name"]].append((dict(_LABEL.findall(found["labels"] or "")), value))
    return dict(out)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
