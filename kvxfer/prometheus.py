"""Read kvxfer's metrics from a page in Prometheus's text format, as engines' HTTP servers have it."""

from __future__ import annotations

import math
import re
from collections import defaultdict

__all__ = ["Samples", "read_samples"]

# Ray exports the metrics of all engines of a host on one page, each name with its own in front.
_SAMPLE = re.compile(r"(?:ray_)?(?P<name>kvxfer_\w+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Samples = dict[str, list[tuple[dict[str, str], float]]]


def read_samples(page: str) -> Samples:
    """Return the samples of kvxfer on a page, without those that are no finite number."""
    out: Samples = defaultdict(list)
    for line in page.splitlines():
        if (found := _SAMPLE.match(line)) and math.isfinite(value := _number(found["value"])):
            out[found["name"]].append((dict(_LABEL.findall(found["labels"] or "")), value))
    return dict(out)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
