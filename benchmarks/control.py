"""What authentication costs the control plane: ``python benchmarks/control.py [--seconds 3] [--rounds 5]``.

Messages: one process asks, another answers over a control socket, with so many questions under way that neither waits.
Transfers: one agent fetches single blocks from another, many at a time, over the back end ``zmq``; nearly all of what that
takes is control. Either is measured with and without a key, in turns, and the median of the rounds is compared.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from kvxfer.config import Config
from kvxfer.geometry import Cache, Group, Region, View
from kvxfer.identity import Source, TransferId
from kvxfer.security import Security, make_key
from kvxfer.session import Agent, Directory, Ended, Fetch, Offered, Released, wire
from kvxfer.session import messages as m

UNDER_WAY = 200
TABLE = np.arange(256)  # the blocks of a prompt of 4,096 tokens
BLOCK = 4096

spawn = mp.get_context("spawn")


def answer(pipe: Connection, config: Config) -> None:
    """Answer wants with haves until told to stop."""
    hub = wire.Hub(Security.of(config))
    router, port = hub.listen("127.0.0.1", 0)
    pipe.send(port)
    have = m.Have(TransferId("own/1/x", 0), 1, 1, 0, 0, 4096, True, (m.pack_blocks(TABLE),), 0, 0)
    while not pipe.poll():
        if router in hub.poll(0.5):
            while (frames := wire.receive(router)) is not None:
                m.decode(frames[1])
                wire.send(router, have, to=frames[0])


def messages(config: Config, seconds: float) -> float:
    """Questions and answers a second."""
    pipe, theirs = spawn.Pipe()
    process = spawn.Process(target=answer, args=(theirs, config), daemon=True)
    process.start()
    hub = wire.Hub(Security.of(config))
    sock = hub.dial(wire.address("127.0.0.1", pipe.recv()))
    want = m.Want(TransferId("own/1/x", 0), 1, b"digest of 16 byt", 0, 4096, (m.pack_blocks(TABLE),), 1, 30.0)
    for _ in range(UNDER_WAY):
        wire.send(sock, want)
    count, begin = 0, None
    while begin is None or time.perf_counter() - begin < seconds:
        hub.poll(5.0)
        while (frames := wire.receive(sock)) is not None:
            m.decode(frames[0])
            wire.send(sock, want)
            count += 1
        if begin is None and count > UNDER_WAY:
            count, begin = 0, time.perf_counter()
    rate = count / (time.perf_counter() - begin)
    pipe.send(None)
    process.join()
    hub.close()
    return rate


def engine(config: Config) -> tuple[Agent, Directory]:
    memory = np.zeros(BLOCK * UNDER_WAY, np.uint8)
    view = View("kv", 0, ("layer",), (0,), UNDER_WAY, BLOCK, BLOCK, "bench")
    cache = Cache((Region(memory.ctypes.data, memory.nbytes),), (Group(16),), (view,))
    agent = Agent(cache, config)
    agent.memory = memory  # type: ignore[attr-defined]  # lives as long
    directory = Directory("e", agent.epoch, "127.0.0.1", 0, security=Security.of(config))
    directory.publish((agent.member,))
    return agent, directory


def produce(pipe: Connection, config: Config) -> None:
    agent, directory = engine(config)
    pipe.send(directory.source)
    while (first := pipe.recv()) is not None:
        for i in range(first, first + UNDER_WAY):
            table = (np.array([i % UNDER_WAY], np.int64),)
            agent.offer(Offered(TransferId("own/1/x", i), b"d", 1, 16, table, True))
        agent.events()
    agent.close()
    directory.close()


def transfers(config: Config, seconds: float) -> float:
    """Transfers a second."""
    pipe, theirs = spawn.Pipe()
    process = spawn.Process(target=produce, args=(theirs, config), daemon=True)
    process.start()
    source: Source = pipe.recv()
    agent, directory = engine(config)
    done, begin, first = 0, 0.0, 0
    while not begin or time.perf_counter() - begin < seconds:
        pipe.send(first)
        for i in range(first, first + UNDER_WAY):
            table = (np.array([i % UNDER_WAY], np.int64),)
            agent.fetch(Fetch(str(i), TransferId("own/1/x", i), b"d", source, table, 0, 16))
        released = 0
        while released < UNDER_WAY:
            for event in agent.events():
                if isinstance(event, Ended) and not event.outcome.delivered:
                    raise SystemExit(f"a transfer was not delivered: {event}")
                released += isinstance(event, Released)
            time.sleep(0.001)
        first += UNDER_WAY
        if not begin:
            begin = time.perf_counter()  # links are up
        else:
            done += UNDER_WAY
    rate = done / (time.perf_counter() - begin)
    pipe.send(None)
    process.join()
    agent.close()
    directory.close()
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_key(Path(folder) / "key")
        plain, keyed = Config(lease=5.0), Config(lease=5.0, key_file=str(Path(folder) / "key"))
        measures: dict[str, Callable[[Config, float], float]] = {"messages": messages, "transfers": transfers}
        for name, measure in measures.items():
            rates: dict[str, list[float]] = {"plain": [], "keyed": []}
            for _ in range(options.rounds):
                rates["plain"].append(measure(plain, options.seconds))
                rates["keyed"].append(measure(keyed, options.seconds))
            a, b = (statistics.median(rates[k]) for k in ("plain", "keyed"))
            spread = ", ".join(f"{k} {min(v):.0f} to {max(v):.0f}" for k, v in rates.items())
            print(f"{name}: {a:.0f}/s without a key, {b:.0f}/s with: {100 * (1 - b / a):+.1f} % ({spread})")


if __name__ == "__main__":
    main()
