"""Same-host back end: a kernel copies straight between the GPU memories of two processes (CUDA IPC)."""

from kvxfer_cuda_ipc.transport import CudaIpcTransport

__all__ = ["CudaIpcTransport"]
