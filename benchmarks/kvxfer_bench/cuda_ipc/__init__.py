"""How fast the kernel of back end cuda_ipc is, and ``kvxfer bench cuda-ipc``."""
