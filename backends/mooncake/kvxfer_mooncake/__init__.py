"""Mooncake back end of kvxfer. Importing this loads no Mooncake; making a ``MooncakeTransport`` does."""

from kvxfer_mooncake.transport import MooncakeTransport

__all__ = ["MooncakeTransport"]
