"""CUDA memory. Imports torch, and Triton where it is."""

from kvxfer.memory.cuda.space import CudaSpace, allocate

__all__ = ["CudaSpace", "allocate"]
