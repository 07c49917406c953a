"""Caches of ``tests/geometry/layouts.py`` in a GPU's memory."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch

from kvxfer import memory
from kvxfer.geometry import Region
from tests.geometry.layouts import Store


class OnDevice:
    """A copy of a store's memory."""

    def __init__(self, store: Store, device: str) -> None:
        self.image: Any = torch.from_numpy(store.image.copy()).to(device)
        base = self.image.data_ptr()
        regions = tuple(
            Region(base + start, r.nbytes, device)
            for start, r in zip(store.cache.starts, store.cache.regions, strict=True)
        )
        self.cache = msgspec.structs.replace(store.cache, regions=regions)
        self.space = memory.space(regions) if regions else None

    def bytes(self) -> np.ndarray:
        if self.image.is_cuda:
            torch.cuda.synchronize(self.image.device)
        return self.image.cpu().numpy()
