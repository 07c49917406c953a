"""What an engine that has a scheduler and workers needs around the scheduler and in each of its workers, so that a connector is only hooks.

``SchedulerSide`` lives in the process that schedules, one for each engine: it follows requests, serves the directory by
which other engines find this one, and says with each step what the workers are to do (``Step``). ``WorkerSide`` lives in each
worker, on top of its ``kvxfer.Agent``: it carries that out, and reports what has ended (``Report``). ``BlockPins`` keeps blocks
from being reused if the engine lets go of them while a transfer may still touch them. It works with any pool that counts
references (``BlockPool``); ``PrefixPool`` is such a pool, with a prefix cache, for an engine that has none.

In each step of the engine:

1. The scheduler plans the step, calls ``preempted``, ``runs`` and ``allocated`` for what it planned, then ``step()``, and
   sends the ``Step`` to all workers (a plain value that can be pickled).
2. Each worker calls ``begin(step)`` before its forward pass touches a block, then ``load(step)``, computes, and calls
   ``after_forward(step)``; then ``collect()``, whose ``Report`` goes back to the scheduler. Reports of several ranks may be
   merged on the way.
3. The scheduler passes the report to ``report()``, which says which requests have been loaded, for which that failed, and
   whose blocks are to be freed.

Nothing here knows an engine, a tensor library or a transport.

Behind the two sides, each idea has a module of its own: ``docs/engine-room.md`` says which, and draws the life of a load and of an
offering.
"""

from kvxfer.engine.answers import AnswerCounts, HeldPrefix, Inquiry
from kvxfer.engine.asks import AskCounts
from kvxfer.engine.ends import Update
from kvxfer.engine.exchange import BlockCopy, Report, Step
from kvxfer.engine.pins import BlockPins, BlockPool, ElasticPool, LendingPool
from kvxfer.engine.prefix_pool import PrefixPool
from kvxfer.engine.scheduler import SchedulerSide
from kvxfer.engine.side_channel import ChannelAddress, WorkerChannel
from kvxfer.engine.step_wait import EngineQueue
from kvxfer.engine.worker import WorkerSide
from kvxfer.schedule import Chain, Prefix, PrefixIndex, ScheduleError
from kvxfer.ticket import Ticket

__all__ = [
    "AnswerCounts",
    "AskCounts",
    "BlockCopy",
    "BlockPins",
    "BlockPool",
    "Chain",
    "ChannelAddress",
    "ElasticPool",
    "EngineQueue",
    "HeldPrefix",
    "Inquiry",
    "LendingPool",
    "Prefix",
    "PrefixIndex",
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
