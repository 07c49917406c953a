"""The clock of all that waits. Read it through this module, ``clock.now()``, so that a test can put a played one in its place."""

from __future__ import annotations

import time

now = time.monotonic
wait = time.sleep
