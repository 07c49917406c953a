"""An SGLang server without a GPU: its own program on its own CPU device, and the few things that this lacks.

`python -m tests.e2e.sglang_server` starts one as `python -m sglang.launch_server` does; the log begins with what is not
SGLang's own.
"""

import multiprocessing
import os
import sys
import zlib
from ctypes import string_at
from typing import Any

from tests.sglang import overlay

SAID = (
    f"kvxfer's tests: real are SGLang's HTTP server, scheduler, prefix tree, KV pools, model and disaggregation, on its CPU device. "
    f"Stubs, which raise if they are called: {', '.join(sorted(overlay.STUBBED))}. Layers and attention are SGLang's "
    f"own in torch. Not SGLang's: where that attention finds a window's keys, that it takes latents as they are, and short "
    f"convolutions; the digest of --disaggregation-enable-kv-checksum, which is zlib's instead of a CUDA kernel's; "
    f"torch.cuda.Event, which says that all is done; the pinning of a host pool and the copies out of it; "
    f"its processes, which are forks of the first one."
)
FLAGS = (
    *(
        "--device",
        "cpu",
        "--attention-backend",
        "torch_native",
        "--sampling-backend",
        "pytorch",
        "--grammar-backend",
        "none",
    ),
    *("--dtype", "float32", "--page-size", "16", "--chunked-prefill-size", "256", "--context-length", "2048"),
    *("--max-total-tokens", "8192", "--max-running-requests", "8", "--cuda-graph-backend-decode", "disabled"),
    *(
        "--cuda-graph-backend-prefill",
        "disabled",
        "--skip-server-warmup",
        "--sleep-on-idle",
        "--disaggregation-decode-retraction-backup",
        "cpu_tensor",
    ),
)
"""What suits a CPU. In float32 the tokens do not depend on how a prompt was cut, so that another token is another KV."""
_CORES = ",".join(map(str, sorted(os.sched_getaffinity(0))))
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "SGLANG_HOST_IP": "127.0.0.1",
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "10",  # how long prefill waits for a decode server that has aborted a request
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",  # of decode to prefill
    "SGLANG_CPU_OMP_THREADS_BIND": f"{_CORES}|{_CORES}",  # of up to two ranks, which share them
    "SGLANG_FORCE_FUSED_OP_BACKEND": "torch",
    "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
    "TORCH_COMPILE_DISABLE": "1",
}


def _checksum(computer: Any, pages: Any, states: Any = None) -> int:
    """Return the digest of what `KvChecksumComputer` is about, which SGLang makes by a CUDA kernel."""
    pairs = [(computer._kv_data_ptrs, computer._kv_item_lens, pages)]
    if computer._state_data_ptrs:
        pairs.append((computer._state_data_ptrs, computer._state_item_lens, states))
    digest = 1
    for starts, sizes, items in pairs:
        for start, size in zip(starts, sizes, strict=True):
            for item in items.tolist():
                digest = zlib.adler32(string_at(start + item * size, size), digest)
    return digest


def _load(pool: Any, _: object, there: Any, here: Any, layer: int, *__: object, **___: object) -> None:
    """Copy a layer of a host pool to the device, which SGLang does by a CUDA kernel."""
    pool.device_k_buffers[layer][here] = pool.k_buffer[layer][there]
    pool.device_v_buffers[layer][here] = pool.v_buffer[layer][there]


class _Runtime:
    """CUDA's runtime, as far as SGLang pins a host pool with it."""

    def cudaHostRegister(self, *_: int) -> int:  # noqa: N802
        return 0

    cudaHostUnregister = cudaHostRegister  # noqa: N815


class _Done:
    """An event of a device on which all that was begun is done: `torch.cuda.Event`, which SGLang makes on every device."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def record(self, *_: object) -> None: ...

    def wait(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


def main() -> None:
    """Be the server, as the command line says."""
    print(SAID, flush=True)
    import torch

    torch.cuda.Event, torch.cuda.cudart = _Done, _Runtime  # type: ignore[assignment, misc]
    from tests.e2e.sglang_imported import (
        KvChecksumComputer,
        MHATokenToKVPoolHost,
        load_plugins,
        prepare_server_args,
        run_server,
    )

    KvChecksumComputer.compute = _checksum
    MHATokenToKVPoolHost.load_to_device_per_layer = _load
    # SGLang asks for new interpreters, which would import everything anew: most of a start's time.
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *_, **__: None
    from tests.e2e import sglang_references

    sglang_references.install()
    load_plugins()
    run_server(prepare_server_args(sys.argv[1:]))


if __name__ == "__main__":
    main()
