"""Mixed load on real vLLM servers whose caches are too small for it: ``python benchmarks/mixed_load.py [--minutes 60]``.

Clients send prompts that share prefixes, are left half way, repeat, mix up or withhold what the prefill server said; the
caches hold a few requests only, so that the engines preempt. Prints a line a minute and one JSON object at the end; exits 1
unless every request had the plain server's tokens or a clean error, blocks, threads and descriptors are back where they
were, and memory has not grown in the second half of the time. In the first it does, as that of a vLLM server without a
connector does.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from kvxfer_vllm.demo.load import staged, under_load
from kvxfer_vllm.demo.metrics import received, total
from kvxfer_vllm.demo.model import write_model
from kvxfer_vllm.demo.story import PROMPTS


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--minutes", type=float, default=60)
    options.add_argument("--clients", type=int, default=8)
    options.add_argument("--cache-mib", type=int, default=10, help="KV cache of each server; the longest prompt takes 4")
    options.add_argument("--backend", default="zmq")
    options.add_argument("--seed", type=int, default=0)
    chosen = options.parse_args()
    start = time.monotonic()

    def say(what: str) -> None:
        print(f"{time.monotonic() - start:7.1f} s  {what}", file=sys.stderr, flush=True)

    # Some share their beginnings, most do not: what hits the prefix cache takes no new blocks.
    prompts = [*PROMPTS.values(), *(f"{n}. {text}" for n in range(8) for text in PROMPTS.values())]
    flags = ["--kv-cache-memory-bytes", str(chosen.cache_mib << 20)]
    with tempfile.TemporaryDirectory() as folder:
        model, logs = Path(folder) / "model", Path(folder)
        write_model(model)
        with staged(model, logs, {"backend": chosen.backend, "lease": 3.0}, 1, say, flags, prompts) as (stage, expected):
            until = time.monotonic() + 60 * chosen.minutes

            def meanwhile() -> None:
                while (left := until - time.monotonic()) > 0:
                    time.sleep(min(60, left))
                    preempted = {name: int(total(stage[name], "vllm:num_preemptions_total")) for name in stage.names}
                    resident = {name: stage[name].resources().resident >> 20 for name in stage.names}
                    say(f"preemptions {preempted}, resident MiB {resident}, {received(stage['decode'])}")

            report = under_load(stage, expected, chosen.clients, chosen.seed, meanwhile, warm_up=30 * chosen.minutes)
            report["preemptions"] = {name: int(total(stage[name], "vllm:num_preemptions_total")) for name in stage.names}
    print(json.dumps(report, indent=1))
    return 1 if report["objections"] else 0


if __name__ == "__main__":
    sys.exit(main())
