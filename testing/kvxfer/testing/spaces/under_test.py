"""The suite for the space that ``kvxfer conformance --space`` names, as a file that pytest can run."""

import json
import os
from typing import Any

from kvxfer.testing.recorder import SUBJECT
from kvxfer.testing.spaces.mutants import broken
from kvxfer.testing.spaces.report import space_named
from kvxfer.testing.spaces.suite import SpaceSuite

_subject: dict[str, Any] = json.loads(os.environ[SUBJECT])


class TestSpace(SpaceSuite):
    """The suite for the space that the environment names."""

    space = broken(space_named(_subject["space"]), _subject["mutant"])
    device = _subject["device"]
