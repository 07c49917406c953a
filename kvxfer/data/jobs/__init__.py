"""Jobs: how one part becomes batches. They run on the data thread and never block.

A direct job submits the plan's runs as they are: those of a long part in bounded batches, those of short parts together. Staged
jobs cut the plan into pieces and pass them through slots of staging memory: pack, move as one long run, unpack.
What each side of a staged part does, by verb:

=========  ===========================  =======================================================
verb       producer                     consumer
=========  ===========================  =======================================================
send/recv  packs, sends                 receives into a slot, unpacks
read       packs, says where it lies    reads it into a slot of its own, says so, unpacks
write      packs, writes into the slot  lends a slot for each piece, unpacks once it is written
=========  ===========================  =======================================================
"""

from __future__ import annotations

from kvxfer.data.jobs.direct import SHARED, Direct, in_rounds, shares, submit_together
from kvxfer.data.jobs.job import Job, LinkContext
from kvxfer.data.jobs.staged import Staged
from kvxfer.data.jobs.staged_ways import StagedLend, StagedRead, StagedRecv, StagedSend, StagedServe, StagedWrite
from kvxfer.protocol.values import Move, Role
from kvxfer.transport import Verb

__all__ = ["SHARED", "Direct", "Job", "LinkContext", "in_rounds", "make_job", "shares", "submit_together"]


STAGED: dict[tuple[Verb, Role], type[Staged]] = {
    (Verb.SEND, "producer"): StagedSend,
    (Verb.RECV, "consumer"): StagedRecv,
    (Verb.READ, "producer"): StagedServe,
    (Verb.READ, "consumer"): StagedRead,
    (Verb.WRITE, "producer"): StagedWrite,
    (Verb.WRITE, "consumer"): StagedLend,
}


def make_job(action: Move, context: LinkContext) -> Job:
    """Return the job for a part, by verb and role and whether it is staged."""
    if not action.piece_bytes:
        return Direct(action, context)
    return STAGED[action.verb, action.ref.role](action, context)
