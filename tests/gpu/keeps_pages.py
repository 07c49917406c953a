"""A back end that goes on with the pages which device memory had when it was registered."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from msgspec.structs import replace

from kvxfer.geometry import Region
from kvxfer.transport import Capabilities
from kvxfer_nixl import NixlTransport
from tests.data.elastic_cache import ROWS_A_PAGE
from tests.gpu.cuda_pages import PAGE, second_mapping

__all__ = ["KeepsPages"]


class KeepsPages(NixlTransport):
    """NIXL, told to register other addresses of the same pages, that says it takes elastic memory. For rows of a ``PAGE``."""

    @property
    def capabilities(self) -> Capabilities:
        return dataclasses.replace(super().capabilities, elastic=True)

    def register(self, regions: Sequence[Region]) -> int:
        return super().register([_kept(region) if region.elastic else region for region in regions])


def _kept(region: Region) -> Region:
    return replace(region, address=second_mapping(region.address, region.nbytes, ROWS_A_PAGE * PAGE))
