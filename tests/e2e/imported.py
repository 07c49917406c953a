"""What a server has imported when it is ready, and its program: of a process that has imported this, servers are forked.

A start on the CPU is mostly imports: a server, its engine and each worker import torch and vLLM by themselves. Here they
are forks of one process, as vLLM has it elsewhere than on CPUs. In `test_demo.py` servers start as a user starts them.
"""

import gc
import multiprocessing
import os
import runpy

gc.disable()  # until all is imported
# Nothing is compiled: with --enforce-eager vLLM still has each worker of several compile a mask of three comparisons.
os.environ["TORCH_COMPILE_DISABLE"] = "1"

from vllm.utils import system_utils  # noqa: E402

# First, since other modules take it from there. On CPUs vLLM asks for new interpreters, which would import everything anew.
system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")

import vllm.entrypoints.openai.api_server  # noqa: E402, F401
import vllm.model_executor.models.llama  # noqa: E402, F401
import vllm.v1.engine.core  # noqa: E402, F401
import vllm.v1.executor.multiproc_executor  # noqa: E402, F401
import vllm.v1.worker.cpu_worker  # noqa: E402, F401
from vllm.distributed.device_communicators import shm_broadcast  # noqa: E402

# An engine and its workers sleep until the other has written, and look by themselves now and then, since such a word may be
# lost. By default each looks all the time for a second after what it has read: more processes than there are cores would spin.
shm_broadcast.SpinCondition.__init__.__defaults__ = (0.0,)
shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = 2

gc.freeze()  # what is imported lives on: the forks' collectors neither look at it nor have its pages copied
gc.enable()


def main() -> None:
    """Be the server, as the command line says."""
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


if __name__ == "__main__":
    main()
