"""What an operator is told of a connection that leads to the wrong place, or from the wrong place, and of one that ends."""

from __future__ import annotations

import ssl

AT_ONCE = "it closed the connection before it had said anything (do its 'peers' list this host, and is this its port?)"
HTTP = "it answers in HTTP: this is not the port of an engine's directory, but of a server such as its API"
GONE = "it closed the connection (its process ended, or it gave this side up)"
_ENDS = ConnectionResetError, BrokenPipeError, ssl.SSLEOFError, ssl.SSLZeroReturnError


def why_broken(error: OSError, connected: bool) -> str:
    """Return what an error of a connection means.

    ``connected``: whether a connection was made. A peer whose process ends with bytes unread resets it, and so that is told as its end is.
    """
    if connected and isinstance(error, _ENDS):
        return GONE
    why = getattr(error, "verify_message", "") or getattr(error, "reason", "") or error.strerror or str(error)
    return f"the connection broke: {why}" if connected else f"it cannot be reached: {why}"


def unanswered(seconds: float, connected: bool) -> str:
    """Return that a peer has not answered for this time, and what is known of why; ``connected``: whether a connection was made."""
    why = ", and no connection was made: its host is down, or a firewall or route drops packets"
    if connected:
        why = ", though it took the connection: it hangs, is overloaded, or is no engine of kvxfer"
    return f"it did not answer within {seconds:g} s{why}"
