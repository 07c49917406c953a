"""What a connection means that cannot be made, breaks or stays silent: the wrong place, the wrong keys, a process that has ended.

Trying again changes nothing about keys, unlike about a connection that breaks. So that is told apart: what TLS says then, and what a
side without keys makes of TLS.
"""

from __future__ import annotations

import ssl

AT_ONCE = "it closed the connection before it had said anything (do its 'peers' list this host, and is this its port?)"
HTTP = "it answers in HTTP: this is not the port of an engine's directory, but of a server such as its API"
GONE = "it closed the connection (its process ended, or it gave this side up)"
_ENDS = ConnectionResetError, BrokenPipeError, ssl.SSLEOFError, ssl.SSLZeroReturnError

_ALERT, _HANDSHAKE, _TLS = 0x15, 0x16, 0x03
_ACCESS_DENIED, _INSUFFICIENT_SECURITY = 49, 71
KEYLESS = bytes((_ALERT, _TLS, 3, 0, 2, 2, _INSUFFICIENT_SECURITY))
KEYED = bytes((_ALERT, _TLS, 3, 0, 2, 2, _ACCESS_DENIED))
"""Fatal alerts of TLS: with the first, a side without keys answers a peer that has one, and with the second the other way round.
OpenSSL sends neither by itself."""

_OF_KEYS = (
    "ALERT_UNKNOWN_CA",
    "ALERT_BAD_CERTIFICATE",
    "ALERT_CERTIFICATE_REVOKED",
    "ALERT_CERTIFICATE_EXPIRED",
    "ALERT_CERTIFICATE_UNKNOWN",
    "ALERT_CERTIFICATE_REQUIRED",
    "ALERT_UNSUPPORTED_CERTIFICATE",
    "ALERT_DECRYPT_ERROR",
    "ALERT_ACCESS_DENIED",
)
_NOT_YET, _NO_MORE = 9, 10
"""OpenSSL's numbers for a certificate whose dates lie ahead, or behind."""
_PLAIN = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "HTTPS_PROXY_REQUEST", "UNKNOWN_PROTOCOL", "PACKET_LENGTH_TOO_LONG")


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


def mismatch(error: OSError, dialled: bool = False) -> str:
    """Return what an error of a connection says of the two sides' keys; empty if it says nothing of them.

    ``dialled``: whether this side dialled. Then something else may listen there, such as an engine's HTTP server.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        if getattr(error, "verify_code", 0) in (_NOT_YET, _NO_MORE):
            return f"the dates of the peer's key do not cover what this host's clock says (TLS: {error.verify_message})"
        return f"the peer uses another key (TLS: {error.verify_message})"
    if not isinstance(error, ssl.SSLError):
        return ""
    reason = getattr(error, "reason", "") or ""
    tls = f"(TLS: {reason.lower().replace('_', ' ')})"
    if reason.endswith("ALERT_INSUFFICIENT_SECURITY"):
        return "the peer has no key, and this engine has one"
    if reason.endswith(_OF_KEYS):
        return f"the peer does not accept this engine's key {tls}"
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return f"the peer presents no key {tls}"
    if reason in _PLAIN:
        other = "; or is it the port of something else than an engine's directory?" if dialled else ""
        return f"the peer speaks without a key, and this engine has one {tls}{other}"
    return ""


def alert_for(error: OSError) -> bytes:
    """Return the alert that tells a peer of a failed handshake what TLS itself does not tell it; mostly nothing."""
    return KEYED if isinstance(error, ssl.SSLError) and getattr(error, "reason", "") in _PLAIN else b""


def spoken(data: bytes | bytearray) -> str:
    """Return what it means that a peer says this first, where this side has no keys; empty unless it is TLS."""
    if data.startswith(KEYED):
        return "the peer has a key, and this engine has none"
    # A record with the beginning of a handshake; as the length of a frame and its beginning this would make no sense.
    if data[:2] == bytes((_HANDSHAKE, _TLS)) and data[5:6] == b"\1" and data[9:11] == b"\3\3":
        return "the peer has a key, and this engine has none"
    return ""
