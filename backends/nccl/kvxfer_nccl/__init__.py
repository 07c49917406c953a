"""NCCL back end of kvxfer. Importing this loads neither NCCL nor torch; making a transport (or ``probe``) does."""

from kvxfer_nccl.transport import NcclTransport

__all__ = ["NcclTransport"]
