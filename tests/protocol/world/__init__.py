"""Two engines of two ranks each, reduced to their machines, in a world that a script of bytes drives.

The world stands in for everything around the machines: engines that offer, preempt, abort, fetch and cancel
(``engines``); links that lose, repeat, reorder, delay and get cut (``network``); a back end whose batches end well,
badly, late, or not quiet (``backend``); crashes and a clock (``world``). It moves real bytes between real (small)
caches, so that what was delivered can be compared, and holds every promise of the session against what it sees. The
same script gives the same run.
"""

from tests.protocol.world.base import Script, Setting, Violation
from tests.protocol.world.settings import SETTINGS
from tests.protocol.world.world import World

__all__ = ["SETTINGS", "Script", "Setting", "Violation", "World"]
