"""A device's context: the kernels in it, and IPC."""

from __future__ import annotations

import ctypes
import functools
from importlib import resources
from types import TracebackType
from typing import Any

from kvxfer.errors import TransportError
from kvxfer_cuda_ipc.endpoint import HANDLE_BYTES
from kvxfer_cuda_ipc.library import check, devices, driver, nvrtc

NOT_READY = 600
PEER_ACCESS_ALREADY_ENABLED = 704


@functools.cache
def context(ordinal: int) -> Context:
    """Return a device's primary context, the one that PyTorch uses too, held for the life of the process.

    Raises:
        TransportError: The device has none.
    """
    if not 0 <= ordinal < devices():
        raise TransportError(f"there is no GPU {ordinal}: this process sees {devices()}")
    return Context(ordinal)


class Context:
    """Entered, it is the calling thread's current context; left, the one before is again."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.api = api = driver()
        self._device = check("opening the GPU", api.cuDeviceGet(ordinal))
        self.uuid = bytes(check("asking for the GPU's UUID", api.cuDeviceGetUuid(self._device)).bytes)
        self.handle = check("opening the GPU's context", api.cuDevicePrimaryCtxRetain(self._device))
        self._kernels: dict[str, Any] = {}

    def __enter__(self) -> Context:
        check("entering the GPU's context", self.api.cuCtxPushCurrent(self.handle))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        check("leaving the GPU's context", self.api.cuCtxPopCurrent())

    def kernel(self, word: int, steps: int) -> Any:
        """Return the copy kernel for words of ``word`` bytes and ``steps`` words a lane and chunk.

        Must be entered.
        """
        name = f"copy{word}x{steps}"
        if name not in self._kernels:
            self._kernels[name] = check(f"finding {name}", self.api.cuModuleGetFunction(self._module, name.encode()))
        return self._kernels[name]

    @functools.cached_property
    def _module(self) -> Any:
        major, minor = (self._attribute(f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
        code = _compile(f"sm_{major}{minor}")
        image = ctypes.create_string_buffer(code, len(code))
        return check("loading the copy kernels", self.api.cuModuleLoadData(ctypes.addressof(image)))

    def _attribute(self, name: str) -> int:
        which = getattr(self.api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(check(f"asking for {name}", self.api.cuDeviceGetAttribute(which, self._device)))

    def reaches(self, uuid: bytes) -> bool | None:
        """Whether this GPU can use the memory of another (or its own); ``None`` when this process does not see it."""
        for other in range(devices()):
            device = check("opening a GPU", self.api.cuDeviceGet(other))
            if bytes(check("asking for a GPU's UUID", self.api.cuDeviceGetUuid(device)).bytes) == uuid:
                if other == self.ordinal:
                    return True
                return bool(check("asking for peer access", self.api.cuDeviceCanAccessPeer(self._device, device)))
        return None

    def allocation(self, address: int) -> tuple[int, int]:
        """Return base and size of what was allocated around an address. The context must be entered.

        Raises:
            CudaError: Nothing was.
        """
        base, size = check("looking up an allocation", self.api.cuMemGetAddressRange(address))
        return int(base), int(size)

    def share(self, base: int) -> bytes:
        """Return a handle by which another process can open an allocation.

        Must be entered.
        """
        handle = check("sharing memory", self.api.cuIpcGetMemHandle(base))
        return ctypes.string_at(int(handle.getPtr()), HANDLE_BYTES)

    def open(self, shared: bytes) -> int:
        """Map another process's allocation, and return its address here. The context must be entered.

        Raises:
            CudaError: It cannot be mapped.
        """
        handle = self.api.CUipcMemHandle()
        ctypes.memmove(int(handle.getPtr()), shared, HANDLE_BYTES)
        lazily = self.api.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        return int(check("opening shared memory", self.api.cuIpcOpenMemHandle(handle, int(lazily))))

    def unmap(self, address: int) -> None:
        """Undo ``open``. Must be entered."""
        check("closing shared memory", self.api.cuIpcCloseMemHandle(address))

    def use(self, other: Context) -> None:
        """Let this GPU touch memory of this process on another. Must be entered."""
        result = self.api.cuCtxEnablePeerAccess(other.handle, 0)
        if result[0] != PEER_ACCESS_ALREADY_ENABLED:
            check("enabling peer access", result)


@functools.cache
def _compile(arch: str) -> bytes:
    api = nvrtc()
    source = resources.files(__package__).joinpath("copy.cu").read_bytes()
    program = check("compiling the copy kernels", api.nvrtcCreateProgram(source, b"copy.cu", 0, [], []))
    result = api.nvrtcCompileProgram(program, 1, [f"--gpu-architecture={arch}".encode()])
    if result[0] != 0:
        log = b" " * int(check("reading the compiler's log", api.nvrtcGetProgramLogSize(program)))
        check("reading the compiler's log", api.nvrtcGetProgramLog(program, log))
        raise TransportError(f"the copy kernels do not compile for {arch}: {log.decode(errors='replace').strip()}")
    code = b" " * int(check("reading the copy kernels", api.nvrtcGetCUBINSize(program)))
    check("reading the copy kernels", api.nvrtcGetCUBIN(program, code))
    check("compiling the copy kernels", api.nvrtcDestroyProgram(program))
    return code
