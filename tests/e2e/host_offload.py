"""vLLM's `OffloadingConnector` for servers on a CPU: its own manager, and a worker that copies blocks from memory to memory.

The worker of vLLM's refuses anything but a GPU. Where there is one it is used: an operator writes `cpu_bytes_to_use` alone.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

OFFLOADING: dict[str, Any] = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 256 << 20},
}
if not torch.cuda.is_available():
    OFFLOADING["kv_connector_extra_config"] |= {"spec_name": "HostOffloadingSpec", "spec_module_path": __name__}


class HostOffloadingSpec(CPUOffloadingSpec):  # type: ignore[misc]
    def get_worker(self, kv_caches: Any) -> HostOffloadingWorker:
        if not self._worker:
            self._worker = HostOffloadingWorker(kv_caches, self.num_chunks)
        return self._worker


class HostOffloadingWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies at once, and tells of it with the next step. For chunks of one block."""

    def __init__(self, kv_caches: Any, chunks: int) -> None:
        self._tensors = [one.tensor for one in kv_caches.tensors]
        self._groups = [[ref.tensor_idx for ref in refs] for refs in kv_caches.group_data_refs]
        self._kept = [torch.empty((chunks, tensor.shape[1]), dtype=torch.int8) for tensor in self._tensors]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(
            job_id, self._tensors, src_spec.block_ids, self._kept, dst_spec.block_ids, src_spec.group_sizes
        )

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(
            job_id, self._kept, src_spec.block_ids, self._tensors, dst_spec.block_ids, dst_spec.group_sizes
        )

    def _copy(self, job: int, src: Any, here: Any, dst: Any, there: Any, sizes: Any) -> bool:
        assert len(here) == len(there) == sum(sizes)
        first = 0
        for group, size in zip(self._groups, sizes, strict=True):
            of, to = (torch.from_numpy(ids[first : first + size]).long() for ids in (here, there))
            for i in group:
                dst[i][to] = src[i][of]
            first += size
        self._done.append(TransferResult(job, True))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None: ...
