"""UCX back end of kvxfer. Importing this loads neither UCX nor CUDA; making a transport (or ``probe``) does."""

from kvxfer_ucx.transport import UcxTransport

__all__ = ["UcxTransport"]
