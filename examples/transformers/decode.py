"""Goes on with prompts that another process has computed, and compares the tokens with those of a plain run."""

import json
import sys

import torch
from exchange import Exchange
from model import ANSWER, make_model, prompts

model = make_model()
exchange = Exchange(model, "decode")
for ids, line in zip(prompts(), sys.stdin, strict=True):
    told = json.loads(line)
    cache = exchange.fetch(told["ticket"], ids[0])
    begun = torch.cat([ids, torch.tensor([[told["first"]]])], 1)
    answer = model.generate(begun, **{exchange.argument: cache}, max_new_tokens=ANSWER - 1, do_sample=False)
    assert torch.equal(answer, model.generate(ids, max_new_tokens=ANSWER, do_sample=False)), (
        "other tokens than a plain run's"
    )
    print(f"{ids.shape[1]} tokens fetched, the answer is a plain run's", flush=True)
exchange.close()
