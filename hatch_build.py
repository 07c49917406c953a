"""Where the sibling distributions come from: the checkout if they stand in it, otherwise an index.

Back ends and connectors are released in lock step with the core, as distributions of their own. In a checkout
they are taken from their folder, so that `pip install .` works before (and between) releases. A release
(`make dist`, which sets KVXFER_RELEASE) names them plainly, pinned to the same version.
"""

import os
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class SiblingsHook(MetadataHookInterface):
    """Fills in the dependencies and extras, with the siblings among them."""

    def update(self, metadata: dict[str, Any]) -> None:
        siblings: dict[str, str] = self.config["siblings"]
        metadata["dependencies"] = self.config["dependencies"]
        metadata["optional-dependencies"] = self.config["extras"] | {
            name: [self._requirement(f"kvxfer-{name}", Path(self.root, folder), metadata["version"])]
            for name, folder in siblings.items()
        }

    @staticmethod
    def _requirement(distribution: str, folder: Path, version: str) -> str:
        if "KVXFER_RELEASE" not in os.environ and (folder / "pyproject.toml").is_file():
            return f"{distribution} @ {folder.resolve().as_uri()}"
        return f"{distribution}=={version}"
