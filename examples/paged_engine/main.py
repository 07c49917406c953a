"""Prefill in one engine, decode in another one of other ranks; the tokens must be those of one engine alone."""

from __future__ import annotations

import random
from typing import Any

from engine import run_engine, spawn

PROMPTS = 12
ANSWER = 24


class Client:
    """An engine in a process of its own."""

    def __init__(self, tp: int, blocks: int, budget: int) -> None:
        self.pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=run_engine, args=(theirs, tp, blocks, budget))
        self.process.start()

    def ask(self, name: str, prompt: list[int], goal: int, offers: bool = False, ticket: str | None = None) -> None:
        self.pipe.send((name, prompt, goal, offers, ticket))

    def answer(self) -> Any:
        if not self.pipe.poll(60):
            raise TimeoutError("the engine does not answer")
        return self.pipe.recv()

    def close(self) -> Any:
        self.pipe.send(None)
        answer = None
        while answer is None or answer[0] != "counts":
            answer = self.answer()
        self.process.join(20)
        return answer[1]


def main() -> None:
    """Compare the answers."""
    rng = random.Random(0)
    shared = [rng.randrange(128) for _ in range(16)]
    prompts = {
        f"r{i}": shared[: 16 * (i % 2)] + [rng.randrange(128) for _ in range(rng.randrange(5, 40))]
        for i in range(PROMPTS)
    }

    alone = Client(tp=1, blocks=400, budget=64)
    for name, prompt in prompts.items():
        alone.ask(name, prompt, ANSWER)
    expected = dict(alone.answer() for _ in prompts)
    alone.close()

    # The prefill engine has two ranks, computes in small chunks, and both are short of blocks.
    prefill, decode = Client(tp=2, blocks=24, budget=16), Client(tp=1, blocks=40, budget=16)
    for name, prompt in prompts.items():
        prefill.ask(name, prompt, 1, offers=True)
    for _ in range(2 * PROMPTS):
        name, said = prefill.answer()
        if isinstance(said, str):  # a ticket, at once: the decode engine fetches while the prompt is computed
            decode.ask(name, prompts[name], ANSWER, ticket=said)
    got = dict(decode.answer() for _ in prompts)
    print("prefill:", prefill.close(), "decode:", decode.close())
    assert got == expected, "other tokens than one engine alone gives"
    print(f"{PROMPTS} answers of {ANSWER} tokens are those of one engine alone")


if __name__ == "__main__":
    main()
