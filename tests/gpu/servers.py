"""vLLM's servers on GPUs, started side by side, and whether what they answer is what a plain one does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from kvxfer_vllm.demo.routing import complete
from kvxfer_vllm.demo.servers import MODEL_NAME, Server, await_ready, connector

TOKENS = 24
TIE = 0.02
"""Logarithm of how much likelier one token may be than another that is taken for as likely."""
FLAGS = (
    "--gpu-memory-utilization",
    "0.1",
    "--kernel-config",
    '{"enable_flashinfer_autotune": false, "enable_cutedsl_warmup": false, "enable_jit_warmup": false}',
)
TRITON = ("--attention-backend", "TRITON_ATTN")
START_S = 240.0


class Servers:
    """Servers of the model in ``folder / "model"``, started side by side, and what a plain one answers.

    ``begun``: what ends them (``ended_together``); ``flags``: of each server; ``tie``: in place of ``TIE``; ``plain``: the server whose
    answers are those of a plain one, such as one that loads nothing.
    """

    def __init__(
        self, folder: Path, begun: list[Server], flags: Sequence[str], tie: float = TIE, plain: str = "plain"
    ) -> None:
        self._folder, self._begun, self._flags, self._tie, self._plain = folder, begun, flags, tie, plain
        self.started: dict[str, Server] = {}
        self._expected: dict[str, list[int]] = {}

    def start(
        self, name: str, backend: str = "", flags: Sequence[str] = (), env: Mapping[str, str] | None = None
    ) -> Server:
        transfer = None
        if backend:
            role = "kv_producer" if name.startswith("prefill") else "kv_consumer"
            settings = {"backend": backend, "transfer_timeout": 60.0, "peer_timeout": 20.0}
            transfer = {**connector(role, settings), "kv_load_failure_policy": "recompute"}
        server = Server(name, self._folder / "model", self._folder, transfer, (*FLAGS, *self._flags, *flags), env)
        self._begun.append(server)
        self.started[name] = server
        return server

    def await_ready(self) -> None:
        await_ready(self.started.values(), START_S)

    def expected(self, prompt: str) -> list[int]:
        """Return what the plain server answers once it has the prompt cached, as a decode server has what it loads.

        With an fp8 cache a prompt computed in one chunk is attended to as it was before it was rounded, so its answer may differ.
        """
        if prompt not in self._expected:
            for _ in range(2):
                self._expected[prompt] = complete(self.started[self._plain], prompt, TOKENS).tokens
        return self._expected[prompt]

    def wrong(self, prompt: str, tokens: list[int]) -> str:
        """Say what is wrong with the tokens that another server gave; nothing is if the plain one gives the same, or has a tie.

        Attention rounds to TF32, and otherwise in a step of one token than in a chunk of a prompt. So where two tokens are as likely as
        each other, servers may differ. Each token must be as likely as the plain server's best, behind those before it.
        """
        if tokens == self.expected(prompt)[: len(tokens)]:
            return ""
        plain = self.started[self._plain]
        ids = plain.post("/tokenize", {"model": MODEL_NAME, "prompt": prompt})["tokens"]
        body = {"model": MODEL_NAME, "prompt": ids + tokens, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
        said = plain.post("/v1/completions", body)["choices"][0]["prompt_logprobs"][len(ids) :]
        behind = [
            max(each["logprob"] for each in at.values()) - at[str(token)]["logprob"]
            for at, token in zip(said, tokens, strict=True)
        ]
        print(f"TIE? {prompt[:40]!r}: {tokens} beside {self.expected(prompt)}; behind the best: {behind}")
        return (
            ""
            if max(behind) < self._tie
            else f"{prompt[:40]!r}: token {behind.index(max(behind))} is {max(behind):.3f} behind"
        )
