"""Computes prompts, and prints a line for each: the ticket by which its KV is fetched, and the first token."""

import json

from exchange import Exchange
from model import make_model, prompts

model = make_model()
exchange = Exchange(model, "prefill")
for ids in prompts():
    made = model.generate(ids, max_new_tokens=1, do_sample=False, return_dict_in_generate=True)
    ticket = exchange.offer(made[exchange.argument], ids[0])
    print(json.dumps({"ticket": ticket, "first": made.sequences[0, -1].item()}), flush=True)
exchange.serve()
exchange.close()
