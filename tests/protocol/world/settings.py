"""The worlds there are: what differs between links, back ends and configurations as the machines see it."""

from tests.protocol.world.base import Setting

SETTINGS = {
    "read": Setting("read"),
    "read, tally seen": Setting("read", seen=True),
    "read, tally seen, short lease": Setting("read", seen=True, lease=2.5),
    "staged read": Setting("read", staged=True),
    "staged read, tally seen": Setting("read", staged=True, seen=True),
    "write": Setting("write"),
    "staged write": Setting("write", staged=True),
    "sendrecv": Setting("sendrecv"),
    "sendrecv, tally seen": Setting("sendrecv", seen=True),
    "read, hashed": Setting("read", integrity="full"),
    "read, hashed, tally seen": Setting("read", integrity="full", seen=True),
    "read, hashed by the device": Setting("read", integrity="full", by_itself=True),
    "staged read, hashed by the device, tally seen": Setting(
        "read", staged=True, integrity="full", by_itself=True, seen=True
    ),
    "write, hashed": Setting("write", integrity="full"),
    "sendrecv, a sample hashed": Setting("sendrecv", integrity="sample"),
    "read, abort by peer": Setting("read", scope="peer"),
    "write, abort by peer, tally seen": Setting("write", scope="peer", seen=True),
    "staged write, abort by peer, hashed": Setting("write", staged=True, scope="peer", integrity="full"),
    "sendrecv, hashed by the device, abort by peer": Setting(
        "sendrecv", integrity="full", by_itself=True, scope="peer"
    ),
    "sendrecv, abort by peer": Setting("sendrecv", scope="peer"),
}
