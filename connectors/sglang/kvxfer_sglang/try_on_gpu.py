"""Run a plain SGLang server, then a prefill and a decode one over kvxfer, and compare what they answer.

    python -m kvxfer_sglang.try_on_gpu MODEL [--prefill-gpu 0] [--decode-gpu 1] [-- further arguments of all servers]

Needs SGLang and one or two GPUs. It speaks to both servers as a router does. With one GPU give each server its share:
``--prefill-gpu 0 --decode-gpu 0 -- --mem-fraction-static 0.4``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

__all__ = ["compare_servers"]

HOST, START_S, ANSWER_S = "127.0.0.1", 900.0, 120.0
TOKENS = 48
PROMPTS = [
    "The capital of France is",
    "Count from one to twenty: one, two, three,",
    "Once upon a time there was a lighthouse keeper who " * 40,
    "def fibonacci(n):\n" * 300,
]


def compare_servers() -> None:
    """Compare, print a line for each prompt, and exit with 1 if an answer differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--prefill-gpu", default="0")
    parser.add_argument("--decode-gpu", default="1")
    own, further = sys.argv[1:], []
    if "--" in own:
        own, further = own[: own.index("--")], own[own.index("--") + 1 :]
    told = parser.parse_args(own)
    with _server(told.model, told.decode_gpu, further) as port:
        plain = [_generate(port, prompt) for prompt in PROMPTS]
    bootstrap = _free_port()
    common = [
        "--disaggregation-transfer-backend",
        "kvxfer",
        "--disaggregation-bootstrap-port",
        str(bootstrap),
        "--disaggregation-enable-kv-checksum",
        *further,
    ]
    with (
        _server(told.model, told.prefill_gpu, ["--disaggregation-mode", "prefill", *common]) as prefill,
        _server(told.model, told.decode_gpu, ["--disaggregation-mode", "decode", *common]) as decode,
        ThreadPoolExecutor(2 * len(PROMPTS)) as threads,
    ):
        answers = []
        for prompt in PROMPTS:  # all at the same time
            room = {"bootstrap_host": HOST, "bootstrap_port": bootstrap, "bootstrap_room": random.getrandbits(62)}
            threads.submit(_generate, prefill, prompt, room)
            answers.append(threads.submit(_generate, decode, prompt, room))
        same = [answer.result() == expected for answer, expected in zip(answers, plain, strict=True)]
    for prompt, fine in zip(PROMPTS, same, strict=True):
        print(f"{'identical' if fine else 'DIFFERENT'}  {prompt[:40]!r} ({len(prompt)} characters)")
    sys.exit(0 if all(same) else 1)


@contextlib.contextmanager
def _server(model: str, gpu: str, further: Sequence[str]) -> Iterator[int]:
    """Start a server, wait until it answers, and stop it at the end."""
    port = _free_port()
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", model, "--host", HOST, "--port", str(port)]
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu, "SGLANG_HOST_IP": HOST}
    process = subprocess.Popen([*command, *further], env=environ)
    try:
        until = time.monotonic() + START_S
        while not _healthy(port):
            if process.poll() is not None:
                raise RuntimeError(f"the server has ended with {process.returncode}: see above")
            if time.monotonic() > until:
                raise TimeoutError(f"the server does not answer after {START_S:.0f} s")
            time.sleep(1)
        yield port
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=5) as answer:
            return int(answer.status) == 200
    except OSError:
        return False


def _generate(port: int, prompt: str, room: dict[str, Any] | None = None) -> str:
    """Return the text with which a server goes on, greedily."""
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    body = json.dumps({"text": prompt, "sampling_params": sampling, **(room or {})}).encode()
    request = urllib.request.Request(f"http://{HOST}:{port}/generate", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
        return str(json.load(answer)["text"])


def _free_port() -> int:
    """Return a port that is free now, below those that the kernel hands out: a server binds it only a minute later."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind((HOST, port))
            return port


if __name__ == "__main__":
    compare_servers()
