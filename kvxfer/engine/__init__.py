"""What an engine needs around its scheduler and in each of its workers, so that it has to write hooks only.

``SchedulerSide`` stands in the process that schedules, one per engine: it follows requests, keeps the directory by which
other engines find this one, and says with each step what the workers are to do (``Step``). ``WorkerSide`` stands in each
worker, over its ``kvxfer.Agent``: it does that, and reports what has ended (``Report``). ``BlockPins`` keeps blocks from
reuse where the engine lets go of them while a transfer may still touch them; it works on any pool that counts references
(``BlockPool``); ``PrefixPool`` is one, with a prefix cache, for an engine that has none.

One step of an engine, in its own order:

1. The scheduler plans a step, calls ``preempted``, ``runs`` and ``allocated`` for what it planned, then ``step()``, and
   ships the ``Step`` to all workers (a plain value: pickle will do).
2. Each worker calls ``begin(step)`` before its forward pass touches a block, ``load(step)``, computes, and calls
   ``after_forward(step)``; then ``collect()``, whose ``Report`` goes back to the scheduler. Reports of several ranks may be
   merged on the way.
3. The scheduler passes it to ``report()``, which says which requests have been loaded, which have failed to be, and whose
   blocks are to be freed.

Nothing here knows an engine, a tensor library or a transport.

Behind the two sides each idea has a module of its own:

- ``exchange``: what crosses between the two sides, with steps; ``dispatch`` and ``side_channel``: what goes ahead of a step.
- ``loads``: a request's load, from its arrival to its end; ``loading``: the blocks that it fills; ``prefetch``: loads within the
  step, with ``paces``, what links have shown; ``rank_ends``: what becomes of loads on one rank; ``load_ends``: what
  the ranks say of them, joined.
- ``computed``: how far a step is in the layers; ``offered``: blocks that others may be reading; ``standstill``: engines that wait
  for each other's blocks.
- ``notices``: what engines tell each other by their directories, with ``renewals`` of leases and ``starts`` of producers.
- ``pins``: blocks kept from reuse; ``prefix_pool``: a pool of blocks for engines that have none.
- ``trace``: a line for each load that ends.
"""

from kvxfer.engine.exchange import BlockCopy, Report, Step
from kvxfer.engine.load_ends import Update
from kvxfer.engine.pins import BlockPins, BlockPool, ElasticPool, LendingPool
from kvxfer.engine.prefix_pool import PrefixPool
from kvxfer.engine.scheduler import SchedulerSide
from kvxfer.engine.side_channel import ChannelAddress, WorkerChannel
from kvxfer.engine.worker import WorkerSide
from kvxfer.schedule import ScheduleError
from kvxfer.ticket import Ticket

__all__ = [
    "BlockCopy",
    "BlockPins",
    "BlockPool",
    "ChannelAddress",
    "ElasticPool",
    "LendingPool",
    "PrefixPool",
    "Report",
    "ScheduleError",
    "SchedulerSide",
    "Step",
    "Ticket",
    "Update",
    "WorkerChannel",
    "WorkerSide",
]
