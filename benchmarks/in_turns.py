"""One back end with different options, and its library by itself, in turns: what a change of options does on a noisy machine.

    python benchmarks/in_turns.py cma '{"threads": 1}' '{"threads": 2}' --model pages-of-16k --tokens 16384

Each round moves the same scattered blocks once with each set of options (JSON objects) and once with the library, a message or
descriptor a run. Prints a JSON object for each: GB/s of the median round and of the round at the upper quartile, and their ratios
to the library's (for the median, of the rounds' own ratios). Nothing is checked here but that all transfers end; ``kvxfer bench
transfer`` compares bytes.
"""

from __future__ import annotations

import argparse
import json
import statistics
from contextlib import ExitStack

from kvxfer.bench.pair import devices, pair
from kvxfer.bench.shapes import MODELS, Request


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend")
    parser.add_argument("options", nargs="+", type=json.loads, help="backend_options, one JSON object for each variant")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--model", default="llama-3-8b", choices=MODELS)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--staging-bytes", type=int, default=64 << 20)
    args = parser.parse_args()
    model = MODELS[args.model]
    request = Request(model, args.tokens)
    src, dst, nbytes = request.src, request.dst, request.nbytes
    with ExitStack() as stack:
        where = devices(args.device)
        made = (pair(args.backend, o, model, request.blocks, where, args.staging_bytes) for o in args.options)
        pairs = [stack.enter_context(each) for each in made]
        for both in pairs:
            both.connect()
        two_sided = pairs[0].connect_raw()
        raw, own = [], [[] for _ in pairs]  # seconds
        for _ in range(args.rounds + 2):
            if two_sided is not None:
                raw += pairs[0].move_raw(src, dst, [True], two_sided)[0][0]
            for both, seconds in zip(pairs, own, strict=True):
                seconds += both.move(src, dst)[0]
    raw = raw[2:]
    if raw:
        print(json.dumps({"library": args.backend, **rates(raw, nbytes)}))
    for options, seconds in zip(args.options, own, strict=True):
        out = {"options": options, **rates(seconds[2:], nbytes)}
        if raw:
            out["to_library"] = round(statistics.median(r / s for r, s in zip(raw, seconds[2:], strict=True)), 2)
            out["upper_quartile_to_library"] = round(quartile(raw) / quartile(seconds[2:]), 2)
        print(json.dumps(out))


def rates(seconds: list[float], nbytes: int) -> dict[str, float]:
    return {
        "GB_per_s": round(nbytes / statistics.median(seconds) / 1e9, 2),
        "upper_quartile_GB_per_s": round(nbytes / quartile(seconds) / 1e9, 2),
    }


def quartile(seconds: list[float]) -> float:
    return sorted(seconds)[len(seconds) // 4]


if __name__ == "__main__":
    main()
