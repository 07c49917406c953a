import sys

import numpy as np
from shape import FACTS, make_cache

from kvxfer import Agent, BlockTable, Config, Ended, Ticket, digest, sealed

ticket = Ticket.read(sys.stdin.readline().strip())

memory, cache = make_cache()
prompt, blocks = list(range(40)), [1, 2, 4]
with Agent(cache, Config(), "decode", FACTS) as agent:
    check = digest(tokens=prompt, model=sealed(FACTS))
    table = BlockTable.of([blocks])
    assert ticket.digest == check, "a ticket for another prompt"
    agent.fetch(ticket.fetch("request-1", table, start=0, tokens=len(prompt), offered=True))

    ended = next((event for event in agent.events(timeout=60) if isinstance(event, Ended)), None)

tokens = memory[:, blocks].reshape(4, -1, 256)
assert ended is not None and ended.outcome.delivered, ended and ended.outcome.failure
assert (tokens[:, :40] == np.arange(256, dtype=np.uint8)).all()
print(f"delivered: {ended.nbytes} bytes")
