"""A rank of an SGLang engine whose forward passes are played: SGLang's pool, manager, senders and receivers, and ours behind them.

A process of its own, since SGLang keeps its configuration in globals; `python -m tests.sglang.played FD` forks them. It hears calls
as lines of JSON, `[method, arguments]`, and answers each with `{"value": ...}` or `{"error": text}`; first with its number, and
once it is ready.
"""

import contextlib
import gc
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from tests.sglang import overlay

LAYERS, HEADS, DIM, PAGE, PAGES, ROWS = 5, 4, 8, 16, 64, 8
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HEADS * DIM,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 96,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
START_S = 60.0


FULL = {"swa": [0, 2], "mamba": [0, 3], "dsa": [*range(LAYERS)]}
"""Layers with full attention, by the kind of the others. Of two stages, SGLang gives the first one two layers."""


def _pool_with_states(kind: str, heads: int, layers: range) -> Any:
    """Return one of SGLang's pools that have more than pages of full attention, of a stage with these layers."""
    import torch
    from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, HybridLinearKVPool, MambaPool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    full = [layer for layer in layers if layer in FULL[kind]]
    others = [layer for layer in layers if layer not in full]
    common = {"size": PAGES * PAGE, "dtype": torch.bfloat16, "device": "cpu", "enable_memory_saver": False}
    if kind == "dsa":
        latents = {"kv_lora_rank": 24, "qk_rope_head_dim": 8, "kv_cache_dim": 32, "index_head_dim": 128}
        return DSATokenToKVPool(page_size=64, layer_num=len(layers), start_layer=layers.start, **latents, **common)
    attention = {"page_size": PAGE, "head_num": heads, "head_dim": DIM, "full_attention_layer_ids": full}
    if kind == "swa":
        return SWAKVPool(size_swa=PAGES * PAGE, swa_attention_layer_ids=others, **attention, **common)
    sizes = {"intermediate_size": 64, "n_groups": 2, "num_heads": 4, "head_dim": 16, "state_size": 8, "conv_kernel": 4}
    shape = Mamba2StateShape.create(tp_world_size=HEADS // heads, **sizes)
    params = Mamba2CacheParams(shape=shape, layers=others)
    states = MambaPool(size=ROWS, spec_state_size=ROWS, cache_params=params, mamba_layer_ids=others, device="cpu")
    return HybridLinearKVPool(mamba_pool=states, start_layer=layers.start, **attention, **common)


def _arrays(states: list[list[int]] | None) -> list[Any] | None:
    import numpy as np

    return None if states is None else [np.array(ids, np.int32) for ids in states]


class Rank:
    """What the two kinds of ranks share.

    Args:
        setup: `role`, `port` of the bootstrap server, `tp`, `stages` of a pipeline (1) and `rank` among all of them, `store`
            (a file by which ranks meet), `model` (a folder), and `args`, further arguments of the server by name; `latent` for
            a pool of latents; `pool` for one with states (`swa`, `mamba`, `dsa`); `draft` for a draft model of one layer and
            two heads; `host` for a second pool, in host memory, at decode; `chunk`, tokens of a forward pass, for a rank with
            a scheduler; `dp_rank` for one of several data-parallel ranks.
    """

    def __init__(self, setup: dict[str, Any]) -> None:
        import torch
        from sglang.srt import runtime_context
        from sglang.srt.disaggregation import utils
        from sglang.srt.distributed.utils import get_pp_indices
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import ServerArgs

        load_plugins()
        self.role, self.tp, self.port, stages = setup["role"], setup["tp"], setup["port"], setup.get("stages", 1)
        self.stage, self.rank = divmod(setup["rank"], self.tp)
        self.dp_rank = setup.get("dp_rank")
        self.layers = range(*get_pp_indices(LAYERS, self.stage, stages))
        self.server_args = ServerArgs(
            model_path=setup["model"],
            device="cpu",
            page_size=64 if setup.get("pool") == "dsa" else PAGE,
            tp_size=self.tp,
            pp_size=stages,
            skip_tokenizer_init=True,
            host="127.0.0.1",
            port=1,
            disaggregation_mode=self.role,
            disaggregation_transfer_backend="kvxfer",
            disaggregation_bootstrap_port=self.port,
            **setup.get("args", {}),
        )
        ranks = runtime_context.SpawnRanks(world_rank=setup["rank"], dp_rank=setup.get("dp_rank"), gpu_id=0)
        runtime_context.publish(self.server_args, role="scheduler", ranks=ranks)
        ranks, world = range(self.tp * stages), setup["rank"]
        group = _Group.world(len(ranks), world, setup["store"])
        # All ranks make all groups, in one order.
        by_stage = [group.among([*ranks[i * self.tp : (i + 1) * self.tp]]) for i in range(stages)]
        across = [group.among([*ranks[i :: self.tp]]) for i in range(self.tp)]
        runtime_context.get_parallel().override_permanently(
            pp_group=across[self.rank], attn_tp_group=by_stage[self.stage]
        )
        backend = utils.TransferBackend("kvxfer")
        kinds = utils.KVClassType
        self.classes = {kind: utils.get_kv_class(backend, kind) for kind in kinds}
        if self.role == "prefill" and world == 0:
            self.bootstrap = self.classes[kinds.BOOTSTRAP_SERVER](host="127.0.0.1", port=self.port)
            _wait_for(self.port)
        group.barrier()
        torch.set_num_threads(1)
        self.states = setup.get("pool", "")
        self.page = 64 if self.states == "dsa" else PAGE  # no other size has an index
        self.latent = bool(setup.get("latent")) or self.states == "dsa"
        self.draft = bool(setup.get("draft"))
        self.pool, self.draft_pool = self._pool(), self._draft_pool() if self.draft else None
        self.host_pool = self._pool() if setup.get("host") and self.role == "decode" else None
        self._begin(setup)
        group.barrier()

    def _begin(self, setup: dict[str, Any]) -> None:
        """Make SGLang's manager."""
        import torch
        from sglang.srt.disaggregation import utils

        self.metadata = utils.MetadataBuffers(ROWS, 16, torch.float32, 128)
        mode = utils.DisaggregationMode(self.role)
        manager = self.classes[utils.KVClassType.MANAGER]
        self.manager = manager(self._kv_args(), mode, self.server_args, self.latent)
        self.requests: dict[int, Any] = {}

    def _pool(self) -> Any:
        import torch
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

        if self.states:
            return _pool_with_states(self.states, HEADS // self.tp, self.layers)
        size = {"size": PAGES * PAGE, "page_size": PAGE}
        common = {**size, "dtype": torch.bfloat16, "layer_num": len(self.layers), "device": "cpu"}
        common["start_layer"] = self.layers.start
        if self.latent:
            return MLATokenToKVPool(kv_lora_rank=24, qk_rope_head_dim=8, enable_memory_saver=False, **common)
        return MHATokenToKVPool(head_num=HEADS // self.tp, head_dim=DIM, enable_memory_saver=False, **common)

    def _draft_pool(self) -> Any:
        import torch
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        size = {"size": PAGES * PAGE, "page_size": PAGE, "head_num": 2 // self.tp, "head_dim": DIM, "layer_num": 1}
        return MHATokenToKVPool(dtype=torch.bfloat16, device="cpu", enable_memory_saver=False, **size)

    def _buffers(self) -> list[Any]:
        """Return the buffers of all layers, in SGLang's order."""
        pools = [getattr(self.pool, "full_kv_pool", self.pool)] + ([self.draft_pool] if self.draft else [])
        return [
            b
            for pool in pools
            for b in (pool.kv_buffer if hasattr(pool, "kv_buffer") else pool.k_buffer + pool.v_buffer)
        ]

    def _kv_args(self) -> Any:
        from sglang.srt.disaggregation import utils

        args = self.classes[utils.KVClassType.KVARGS]()
        args.engine_rank, args.pp_rank, args.system_dp_rank, args.gpu_id = self.rank, self.stage, self.dp_rank, 0
        args.prefill_start_layer = self.layers.start
        args.kv_cache_dtype_str, args.kv_layout, args.page_size = "bfloat16", None, self.page
        args.kv_layer_ids = utils.build_kv_layer_ids(
            token_to_kv_pool=self.pool, draft_token_to_kv_pool=None, num_draft_entries=0, num_hidden_layers=LAYERS
        )
        args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = self.pool.get_contiguous_buf_infos()
        if self.draft:
            more = self.draft_pool.get_contiguous_buf_infos()
            args.num_draft_entries = len(more[0])
            args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = (
                mine + theirs
                for mine, theirs in zip((args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens), more, strict=True)
            )
        if self.host_pool is not None:
            args.host_kv_data_ptrs, args.host_kv_data_lens, args.host_kv_item_lens = (
                self.host_pool.get_contiguous_buf_infos()
            )
        args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens = self.metadata.get_buf_infos()
        utils.setup_state_kv_args(args, self.pool, None, LAYERS)
        return args

    def pages(self, ids: list[int]) -> list[Any]:
        """Return the pages of each buffer, as [page, token, head, dim] with this rank's heads, or [page, token, dim]."""
        return [b.view(-1, self.page, *b.shape[1:])[ids] for b in self._buffers()]

    def content(self, seed: int, first: int, count: int) -> list[Any]:
        """Return what a request's pages [first, first + count) hold in this rank's buffers, made up from a seed."""
        import torch

        made = []
        sides = 1 if self.latent else 2
        layers = [layer for layer in self.layers if layer in FULL.get(self.states, self.layers)]
        buffers = [(side * LAYERS + layer, HEADS) for side in range(sides) for layer in layers]
        for buffer, heads in buffers + ([(100, 2), (101, 2)] if self.draft else []):
            draw = torch.Generator().manual_seed(1000 * seed + buffer)
            latent = self.latent and buffer < 100
            shape = (PAGES, self.page, 1, 32) if latent else (PAGES, self.page, heads, DIM)
            whole = torch.randn(shape, generator=draw).to(torch.bfloat16)[first : first + count]
            here = heads // self.tp
            made.append(whole if latent else whole[:, :, self.rank * here : (self.rank + 1) * here])
        return made

    def matches(self, seed: int, ids: list[int], first: int = 0) -> bool:
        """Whether pages hold what a request's pages from `first` on should."""
        import torch

        return all(map(torch.equal, self.pages(ids), self.content(seed, first, len(ids))))

    def _state_buffers(self, ids: list[list[int]]) -> Iterator[tuple[int, Any, int]]:
        """Yield the layer of each buffer of each state, the buffer as [item, byte], and each of these items of it."""
        import ctypes

        import torch

        args = self.manager.kv_args
        for ptrs, lens, sizes, named, own in zip(
            args.state_data_ptrs, args.state_data_lens, args.state_item_lens, args.state_layer_ids, ids, strict=True
        ):
            layers = named or [self.layers.start + i for i in range(len(ptrs))]
            for layer, start, nbytes, size in zip(layers, ptrs, lens, sizes, strict=True):
                memory = torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(start), dtype=torch.uint8)
                yield from ((layer, memory.view(-1, size), i) for i in own)

    def state_items(self, ids: list[list[int]]) -> list[Any]:
        """Return the items of each buffer of each state, as bytes."""
        return [buffer[i] for _, buffer, i in self._state_buffers(ids)]

    def state_content(self, seed: int, ids: list[list[int]]) -> list[Any]:
        """Return what these items are to hold, made up from a seed: of each layer and tensor another, and of each rank."""
        import torch

        made, seen = [], Counter[int]()
        for layer, buffer, i in self._state_buffers(ids):
            key = (seed, layer, seen[layer], 0 if self.latent else self.rank)
            draw = torch.Generator().manual_seed(hash(key) % (1 << 40))
            made.append(torch.randint(0, 256, buffer[i].shape, generator=draw, dtype=torch.uint8))
            seen[layer] += 1
        return made

    def states_match(self, seed: int, ids: list[list[int]]) -> bool:
        """Whether items of each state hold what they should."""
        import torch

        return all(map(torch.equal, self.state_items(ids), self.state_content(seed, ids)))

    def run_states(self, seed: int, ids: list[list[int]]) -> None:
        """Play what a forward pass writes into states."""
        for item, made in zip(self.state_items(ids), self.state_content(seed, ids), strict=True):
            item[:] = made

    def row(self, index: int) -> list[int]:
        """Return the first token and the room in a row of the metadata."""
        return [int(self.metadata.output_ids[index, 0]), int(self.metadata.bootstrap_room[index, 0])]

    def refusal(self, args: dict[str, Any], settings: dict[str, dict[str, Any]], environ: dict[str, str]) -> str:
        """Return why a server would not start whose `KVArgs`, configuration (by SGLang's name of its part) and environment are so."""
        import copy
        from unittest.mock import patch

        from sglang.srt import runtime_context

        from kvxfer_sglang.support import UnsupportedSetupError, check_setup

        changed = copy.copy(self.manager.kv_args)
        vars(changed).update(args)
        with contextlib.ExitStack() as stack:
            stack.enter_context(patch.dict("os.environ", environ))
            for part, values in settings.items():
                real = getattr(runtime_context, f"get_{part}")()
                stack.enter_context(
                    patch.object(runtime_context, f"get_{part}", lambda r=real, v=values: _Changed(r, v))
                )
            try:
                check_setup(changed, self.role == "decode")
            except UnsupportedSetupError as error:
                return str(error)
        return ""

    def why(self, room: int) -> str:
        """Return what SGLang's scheduler is told of a failed request; it lets go of it by that."""
        from sglang.srt.disaggregation.common.conn import KVTransferError

        self.failed = self.requests.pop(room)
        try:
            self.failed.failure_exception()
        except KVTransferError as error:
            return str(error)
        return ""

    def abort_late(self) -> None:
        """Abort the request that was let go of last, as SGLang does if a retracted one's answer from prefill is an error."""
        self.over.abort()

    def weights(self, version: str) -> None:
        """Name the weights otherwise, as SGLang does once they have been updated in place."""
        from sglang.srt import runtime_context

        runtime_context.get_context().override("scheduler.weight_version", weight_version=version)

    def close(self) -> None:
        """Stop."""
        self.manager.teardown()

    def manager_may_switch(self) -> bool:
        """Whether SGLang would switch a server with this back end."""
        return bool(self.manager.supports_role_switch)

    def switch(self) -> None:
        """Take the other role, as SGLang does with an idle server: the manager goes, and the pool stays."""
        from sglang.srt import runtime_context
        from sglang.srt.disaggregation.common.conn import CommonKVReceiver

        self.manager.teardown()
        if self.role == "decode":
            CommonKVReceiver.close_all_sockets()
        self.role = {"prefill": "decode", "decode": "prefill"}[self.role]
        runtime_context.get_context().override("role_switch.flip", disaggregation_mode=self.role)
        self.__class__ = {"prefill": Prefill, "decode": Decode}[self.role]
        self._begin({})


class Prefill(Rank):
    """A prefill rank."""

    def request(self, room: int) -> None:
        """Take a request in."""
        from sglang.srt.disaggregation.utils import KVClassType

        sender = self.classes[KVClassType.SENDER]
        self.requests[room] = sender(mgr=self.manager, bootstrap_addr=f"127.0.0.1:{self.port}", bootstrap_room=room)

    def poll(self, room: int) -> int:
        """Return SGLang's state of a request."""
        return int(self.requests[room].poll())

    def begin(self, room: int, pages: int, row: int) -> int:
        """Say how many pages there will be and where the metadata lie; return how many tokens decode has."""
        prefix = self.requests[room].pop_decode_prefix_len()
        self.requests[room].init(pages, row)
        return int(prefix)

    def run(self, seed: int, ids: list[int], first: int = 0) -> None:
        """Play a forward pass: write a request's pages from `first` on."""
        for pages, made in zip(self.pages(ids), self.content(seed, first, len(ids)), strict=True):
            assert pages.shape == made.shape
        for buffer, made in zip(self._buffers(), self.content(seed, first, len(ids)), strict=True):
            buffer.view(-1, self.page, *buffer.shape[1:])[ids] = made

    def note(self, row: int, token: int, room: int) -> None:
        """Write a request's metadata."""
        self.metadata.output_ids[row, 0] = token
        self.metadata.bootstrap_room[row, 0] = room

    def send(self, room: int, ids: list[int], held: bool = False, states: list[list[int]] | None = None) -> None:
        """Send the next pages; held ones are complete once `finish` is called, as those of an event on a GPU."""
        import numpy as np

        if held:
            self.event = self.requests[room]._early_send_wait_event = _Event()
        self.requests[room].send(np.array(ids, np.int32), _arrays(states))

    def finish(self) -> None:
        """Let what was held be complete."""
        self.event.over = True

    def abort(self, room: int) -> None:
        """Abort a request."""
        self.requests[room].abort()

    def clear(self, room: int) -> None:
        """Let go of a request that went well."""
        self.over = self.requests.pop(room)
        self.over.clear()


class Decode(Rank):
    """A decode rank."""

    def request(self, room: int) -> None:
        """Take a request in, and find the prefill ranks."""
        from sglang.srt.disaggregation.utils import KVClassType

        address = f"127.0.0.1:{self.port}"
        until = time.monotonic() + START_S
        while not self.manager.try_ensure_parallel_info(address):
            assert time.monotonic() < until, "the prefill ranks have not registered"
            time.sleep(0.1)
        receiver = self.classes[KVClassType.RECEIVER](mgr=self.manager, bootstrap_addr=address, bootstrap_room=room)
        self.requests[room] = receiver
        receiver.init(0)

    def poll(self, room: int) -> int:
        """Return SGLang's state of a request."""
        return int(self.requests[room].poll())

    def want(
        self,
        room: int,
        ids: list[int],
        row: int,
        prefix: int = 0,
        states: list[list[int]] | None = None,
        host: bool = False,
    ) -> None:
        """Say where a request's pages go: into the pool, or into the one in host memory."""
        import numpy as np
        from sglang.srt.disaggregation.base.conn import KVTransferDestination

        where = KVTransferDestination.HOST if host else KVTransferDestination.DEVICE
        self.requests[room].send_metadata(
            np.array(ids, np.int32), row, _arrays(states), decode_prefix_len=prefix, destination=where
        )

    def may_receive_in_host_memory(self, room: int) -> bool:
        """Whether SGLang would let a request do so."""
        return bool(self.manager.supports_host_destination and self.requests[room].supports_host_destination)

    def matches_in_host_memory(self, seed: int, ids: list[int]) -> bool:
        """Whether pages of the host pool hold what a request's first pages should."""
        device, self.pool = self.pool, self.host_pool
        try:
            return self.matches(seed, ids)
        finally:
            self.pool = device

    def abort(self, room: int) -> None:
        """Abort a request."""
        self.requests[room].abort()

    def quiet(self, room: int) -> bool:
        """Whether SGLang may reuse the pages of a failed request."""
        return bool(self.manager.is_abort_release_safe(room, 1))

    def release(self) -> None:
        """Do what SGLang does once nothing writes any more into the pages of the request that failed last."""
        self.failed.clear()

    def clear(self, room: int) -> None:
        """Let go of a request that went well."""
        self.over = self.requests.pop(room)
        self.over.clear()


class Scheduled(Rank):
    """A rank with SGLang's scheduler, whose methods are called by name."""

    def _begin(self, setup: dict[str, Any]) -> None:
        from tests.sglang.scheduling import DecodePlay, PrefillPlay

        self.scheduler: Any
        if self.role == "prefill":
            self.scheduler = PrefillPlay(self.pool, self.server_args, setup["chunk"])
            self.manager = self.scheduler.disagg_prefill_bootstrap_queue.kv_manager
        else:
            self.scheduler = DecodePlay(self.pool, self.server_args)
            self.manager = self.scheduler.disagg_decode_prealloc_queue.kv_manager

    def __getattr__(self, method: str) -> Any:
        return getattr(self.scheduler, method)


class _Changed:
    """A part of SGLang's configuration with other values."""

    def __init__(self, real: Any, values: dict[str, Any]) -> None:
        self._real, self._values = real, values

    def __getattr__(self, name: str) -> Any:
        value = self._values.get(name, getattr(self._real, name))
        return _Changed(getattr(self._real, name), value) if isinstance(value, dict) else value


class _Event:
    """An event as torch has them."""

    over = False

    def query(self) -> bool:
        return self.over


class _Group:
    """SGLang's coordinator of some ranks, over torch's own."""

    def __init__(self, ranks: list[int], rank: int, group: Any) -> None:
        self.ranks, self.world_size, self.cpu_group, self._rank = ranks, len(ranks), group, rank
        self.rank_in_group = ranks.index(rank) if rank in ranks else -1

    @classmethod
    def world(cls, ranks: int, rank: int, store: str) -> "_Group":
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        return cls([*range(ranks)], rank, dist.group.WORLD)

    def among(self, ranks: list[int]) -> "_Group":
        import torch.distributed as dist

        return _Group(ranks, self._rank, dist.new_group(ranks, backend="gloo"))

    def all_gather_object(self, own: Any) -> list[Any]:
        import torch.distributed as dist

        told: list[Any] = [None] * self.world_size
        dist.all_gather_object(told, own, group=self.cpu_group)
        return told

    def broadcast_object(self, own: Any, src: int = 0) -> Any:
        import torch.distributed as dist

        told = [own]
        dist.broadcast_object_list(told, src=self.ranks[src], group=self.cpu_group)
        return told[0]

    def barrier(self) -> None:
        import torch.distributed as dist

        dist.barrier(group=self.cpu_group)


def _wait_for(port: int) -> None:
    import requests

    until = time.monotonic() + START_S
    while time.monotonic() < until:
        try:
            requests.get(f"http://127.0.0.1:{port}/health", timeout=1)
            return
        except (requests.ConnectionError, requests.Timeout):
            time.sleep(0.05)
    raise TimeoutError("SGLang's bootstrap server does not answer")


def main() -> None:
    """Fork a rank for each message of a setup, an environment and a socket: SGLang takes ten seconds to import."""
    asked = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()  # until all is imported
    overlay.install()
    import tests.sglang.scheduling  # noqa: F401

    gc.freeze()
    gc.enable()

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        told, handed, _, _ = socket.recv_fds(asked, 1 << 16, 1)
        if not told:
            os._exit(0)  # what was imported takes seconds to take apart
        if os.fork() == 0:
            asked.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            setup, environ = json.loads(told)
            os.environ.update(environ)
            with socket.socket(fileno=handed[0]) as heard:
                _answer(setup, heard.makefile("r"), heard.makefile("w"))
            os._exit(0)
        os.close(handed[0])


def _answer(setup: dict[str, Any], calls: TextIO, answers: TextIO) -> None:
    """Be a rank, and answer calls until there are no more."""

    def say(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    def tried(call: Callable[[], Any]) -> None:
        try:
            say({"value": call()})
        except Exception as error:
            traceback.print_exc()
            say({"error": f"{type(error).__name__}: {error}"})

    say({"value": os.getpid()})
    rank: list[Any] = []
    kinds = {"prefill": Prefill, "decode": Decode}
    tried(lambda: rank.append((Scheduled if "chunk" in setup else kinds[setup["role"]])(setup)))
    for line in calls:
        method, arguments = json.loads(line)
        tried(lambda m=method, a=arguments: getattr(rank[0], m)(**a))


def model_folder(folder: Path) -> Path:
    """Write the configuration of the played model."""
    (folder / "config.json").write_text(json.dumps(MODEL))
    return folder


if __name__ == "__main__":
    main()
