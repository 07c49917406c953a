"""What an operator is told of a connection that leads to the wrong place, or from the wrong place."""

from __future__ import annotations

__all__ = ["AT_ONCE", "HTTP", "unanswered"]

AT_ONCE = "it closed the connection before it had said anything (do its 'peers' list this host, and is this its port?)"
HTTP = "it answers in HTTP: this is not the port of an engine's directory, but of a server such as its API"


def unanswered(seconds: float, connected: bool, located: bool = True) -> str:
    """Return that a peer has not answered for this time, and what is known of why.

    ``connected``: whether a connection was made. ``located``: whether its host's name has been looked up.
    """
    why = ", and no connection was made: its host is down, or a firewall or route drops packets"
    if connected:
        why = ", though it took the connection: it hangs, is overloaded, or is no engine of kvxfer"
    elif not located:
        why = ", because its host's name has not been looked up yet: the name server of this host is slow, or does not answer"
    return f"it did not answer within {seconds:g} s{why}"
