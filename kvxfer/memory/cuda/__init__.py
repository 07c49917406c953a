"""Memory of CUDA devices. Imports torch, and Triton where it is."""

from kvxfer.memory.cuda.space import CudaSpace

__all__ = ["CudaSpace"]
