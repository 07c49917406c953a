"""The suite for the back end that ``kvxfer conformance`` names, as a file that pytest can run."""

import json
import os
from typing import Any, ClassVar

from kvxfer.testing import ConformanceSuite
from kvxfer.testing.recorder import SUBJECT
from kvxfer.transport import registry

_subject: dict[str, Any] = json.loads(os.environ[SUBJECT])


class TestBackend(ConformanceSuite):
    """The suite for the back end that the environment names."""

    backend = registry.load(_subject.pop("backend"))
    options: ClassVar[dict[str, Any]] = _subject.pop("options")


for _name, _value in _subject.items():
    setattr(TestBackend, _name, _value)
