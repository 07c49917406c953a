"""What commands print for people."""

from __future__ import annotations

from rich.markup import escape

from kvxfer.text import escaped

__all__ = ["verbatim"]


def verbatim(text: object) -> str:
    """Return a text for rich to print as it is: it may come from a peer, and neither controls the terminal nor is markup."""
    return escape(escaped(str(text)))
