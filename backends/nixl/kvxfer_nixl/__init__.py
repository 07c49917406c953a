"""NIXL back end of kvxfer. Importing this loads no NIXL; making a ``NixlTransport`` does."""

from kvxfer_nixl.transport import NixlTransport

__all__ = ["NixlTransport"]
