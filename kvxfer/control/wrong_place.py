"""What an operator is told of a connection that leads to the wrong place, or from the wrong place."""

from __future__ import annotations

__all__ = ["AT_ONCE", "HTTP", "unanswered"]

AT_ONCE = "it closed the connection before it had said anything (do its 'peers' list this host, and is this its port?)"
HTTP = "it answers in HTTP: this is not the port of an engine's directory, but of a server such as its API"


def unanswered(seconds: float, connected: bool) -> str:
    """Return that a peer has not answered for this time, and what it shows whether a connection was made."""
    why = ", and no connection was made: its host is down, or a firewall or route drops packets"
    if connected:
        why = ", though it took the connection: it hangs, is overloaded, or is no engine of kvxfer"
    return f"it did not answer within {seconds:g} s{why}"
