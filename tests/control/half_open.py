"""A directory on a host of its own: one that hears notices, or one that tells another of them without end. See ``test_half_open``."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

from kvxfer.config import Config
from kvxfer.control.directory import Directory
from kvxfer.identity import Source, TransferId
from kvxfer.protocol.messages import Named, Renew

EVERY_S = 0.2


def hears(directory: Directory) -> None:
    source = directory.source
    say(source=[source.host, source.port, source.epoch])
    for _ in sys.stdin:  # from now on
        directory.notices()
        until = time.monotonic() + 60.0
        while not (heard := directory.notices()) and time.monotonic() < until:
            time.sleep(EVERY_S)
        say(heard=len(heard))


def tells(directory: Directory) -> None:
    source = Source(*json.loads(sys.stdin.readline()))

    def tell() -> None:
        while True:
            directory.tell(source, Renew(source.epoch, (Named(TransferId("one", 0), b"d"),)))
            time.sleep(EVERY_S)

    threading.Thread(target=tell, daemon=True).start()
    for _ in sys.stdin:
        rows = [row.split() for row in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
        say(ports=[int(row[1][-4:], 16) for row in rows if int(row[2][-4:], 16) == source.port])


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    role, address = sys.argv[1:]
    with Directory(Config(listen="0.0.0.0", advertise=address, peer_timeout=2.0)) as made:
        {"hears": hears, "tells": tells}[role](made)
