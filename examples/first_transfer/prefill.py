import numpy as np
from shape import FACTS, make_cache

from kvxfer import Agent, BlockTable, Config, Directory, Offer, Released, Ticket, TransferId, digest, sealed

memory, cache = make_cache()
config = Config()
with Agent(cache, config, "prefill", FACTS) as agent, Directory(config, "prefill", FACTS) as directory:
    directory.publish((agent.descriptor,))

    prompt = list(range(40))  # token ids; 40 tokens lie in three blocks of 16
    blocks = [7, 3, 19]
    memory[:, blocks] = np.arange(256, dtype=np.uint8)  # stands for the forward pass

    transfer = TransferId.mint(directory.epoch, "request-1")
    check = digest(tokens=prompt, model=sealed(FACTS))
    agent.offer(Offer(transfer, check, 1, len(prompt), BlockTable.of([blocks]), final=True))

    print(Ticket(transfer, check, directory.source).text, flush=True)

    while events := agent.events(timeout=60):  # the second of this transfer's two events says that it is over
        if any(isinstance(event, Released) for event in events):
            break
