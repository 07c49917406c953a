"""How many layers of the cache the current step has computed, band by band."""

from __future__ import annotations

from kvxfer.engine.exchange import Step
from kvxfer.geometry import Cache, bands


class ComputedBands:
    """Counts the bands of layers that the current step has computed; one thread."""

    def __init__(self, cache: Cache) -> None:
        self._bands = bands(cache)
        self._step: Step | None = None
        self._layers: set[str] = set()
        self._count = 0

    def layer(self, step: Step, layer: str) -> int:
        """Record that a step has computed a layer; return how many bands, from the first on, are now complete; 0 if as many as before.

        Also 0 with the last band: then all layers are complete, which the end of the step tells anyway.
        """
        if self._step is not step:
            self._step, self._count = step, 0
            self._layers.clear()
        self._layers.add(layer)
        before = self._count
        while self._count < len(self._bands) and self._bands[self._count] <= self._layers:
            self._count += 1
        return self._count if before < self._count < len(self._bands) else 0
