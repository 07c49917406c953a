"""SGLang's manager of a rank's transfers, over kvxfer.

SGLang's own bootstrap server and sockets are kept: the server tells a decode rank where the prefill ranks are, and the sockets
carry notes. The KV and the metadata of a request move by a kvxfer transfer, which a ticket names.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import zmq
from msgspec import structs
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import ABORT_TAG, AbortNotification, CommonKVManager
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_device, get_parallel, get_serving, process_model_config
from sglang.srt.utils.network import NetworkAddress

from kvxfer import Cache, KvxferError, PeerError, Rank
from kvxfer.facts import MAX_TEXT
from kvxfer.logs import logger
from kvxfer.memory.fence import DeviceEvent
from kvxfer.security import RateLimitedWarnings
from kvxfer.threads import NamedThread
from kvxfer_sglang.cache import heads_of, host_args, pool_cache, stage_layers
from kvxfer_sglang.decode import DecodeRank
from kvxfer_sglang.identity import server_facts
from kvxfer_sglang.notes import AttemptFailed, PagesOffered, PagesWanted, packed, unpacked
from kvxfer_sglang.prefill import PrefillRank
from kvxfer_sglang.rank import EngineRank
from kvxfer_sglang.settings import settings
from kvxfer_sglang.states import MAMBA, States
from kvxfer_sglang.support import check_adapters, check_setup

log = logger("kvxfer.sglang")

TURN_MS = 500
"""How long the thread waits for a message before it checks whether it is to end."""


class TransferManager(CommonKVManager):
    """One rank's transfers, as SGLang's scheduler uses them; for the arguments see ``CommonKVManager``.

    Raises:
        UnsupportedSetupError: The server is set up in a way whose KV is not moved.
        KvxferError: A setting is wrong, or the back end does not work here.
    """

    supports_deferred_decode_kv_release = True
    supports_role_switch = True

    def __init__(self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool = False) -> None:
        decodes = disaggregation_mode == DisaggregationMode.DECODE
        check_setup(args, decodes)
        check_adapters(server_args)
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        if self.system_dp_size > 1:
            # SGLang's senders tell decode this one, which is 0 on every rank of plain data parallelism.
            self.attn_dp_rank = self.system_dp_rank
        config = settings(self.local_ip, self.waiting_timeout if decodes else self.bootstrap_timeout)
        model = process_model_config()
        heads = heads_of(self.attn_tp_rank, self.attn_tp_size, model.get_total_num_kv_heads())
        self.last_stage = self.pp_rank == self.pp_size - 1  # it samples, so that its metadata are the request's
        rank = Rank(pp=self.pp_rank, tp=self.attn_tp_rank)
        self.states = States.of(args)
        layers = stage_layers(model, self.pp_rank, self.pp_size) if decodes and self.pp_size > 1 else None
        window_heads = heads_of(self.attn_tp_rank, self.attn_tp_size, model.get_swa_num_kv_heads(1))

        def described(pool: Any, device: str) -> Cache:
            own = None if is_mla_backend else heads
            return pool_cache(pool, own, rank, self.attn_tp_size, device, layers, window_heads)

        cache = described(args, self._device())
        self.prefill, self.decode = PrefillRank(self), DecodeRank(self)
        self.tenants: WeakValueDictionary[int, Any] = WeakValueDictionary()  # the sender or receiver that has each room
        side = self.decode if decodes else self.prefill
        facts = server_facts(model, args.kv_cache_dtype_str, config)
        if MAMBA in self.states.kinds:
            facts["state dtypes"] = (
                f"{envs.SGLANG_MAMBA_CONV_DTYPE.get()} {envs.SGLANG_MAMBA_SSM_DTYPE.get() or 'model'}"
            )
        if args.num_draft_entries:
            facts["draft"] = str(server_args.speculative_draft_model_path)[-MAX_TEXT:]
        name = f"sglang-{disaggregation_mode.value}-dp{self.attn_dp_rank}"
        with ExitStack() as opened:
            self._ranks = [EngineRank(cache, config, name, facts, self._gather, side.heard)]
            opened.callback(self._ranks[0].close)
            host = host_args(args) if decodes else None
            if host is not None:  # an agent has one cache; the second one needs a port of its own
                config = structs.replace(config, port=0)
                cache = described(host, "cpu")
                self._ranks.append(EngineRank(cache, config, f"{name}-host", facts, self._gather, side.heard))
            opened.pop_all()
        self.supports_host_destination = host is not None
        side.start(*self._ranks)
        self._stopped = False
        self._complain = RateLimitedWarnings(log)  # who connects to SGLang's socket, it does not ask
        hear = self._hear_decode if decodes else self._hear_prefill
        self._thread = NamedThread(target=self._listen, args=(hear,), name="kvxfer-notes")
        self._thread.start()
        if decodes:
            self._start_heartbeat_checker_thread()

    def _device(self) -> str:
        return "cpu" if get_device().device == "cpu" else f"{get_device().device}:{self.kv_args.gpu_id}"

    def _gather(self, own: Any) -> list[Any]:
        """Return what each rank of the engine has passed to this, beginning with those of the first pipeline stage."""
        stage = [own] if self.attn_tp_size == 1 else get_parallel().attn_tp_group.all_gather_object(own)
        if self.pp_size == 1:
            return stage
        return [told for ranks in get_parallel().pp_group.all_gather_object(stage) for told in ranks]

    # --- what SGLang calls -----------------------------------------------------------------------------------------

    def add_transfer_request(
        self,
        bootstrap_room: int,
        kv_indices: Any,
        index_slice: slice,
        is_last_chunk: bool,
        aux_index: int | None = None,
        state_indices: Any = None,
        wait_event: Any = None,
        **_: Any,
    ) -> None:
        """Offer further pages of a request; ``CommonKVSender.send`` calls it."""
        after = None if wait_event is None else DeviceEvent(wait_event)
        self.prefill.add(
            bootstrap_room, np.asarray(kv_indices).tolist(), is_last_chunk, aux_index, after, state_indices
        )

    def check_status(self, bootstrap_room: int) -> Any:
        """Return SGLang's state of a request; its scheduler asks for it in each of its turns."""
        self._hear()
        return super().check_status(bootstrap_room)

    def build_receiver_metadata_message(
        self, *, bootstrap_room: int, required_dst_info_num: int, decode_prefix_len: int | None, **_: Any
    ) -> list[bytes]:
        """Return what a prefill rank is told; ``CommonKVReceiver.send_metadata`` sends it to each."""
        attempt = self.tenants[bootstrap_room].attempt
        prefix = decode_prefix_len or 0
        return packed(
            PagesWanted(
                bootstrap_room, attempt, self.local_ip, self.rank_port, prefix, required_dst_info_num, self.pp_size
            )
        )

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        """Whether nothing writes into the pages of a failed request any more; kvxfer knows, so that no prefill rank is asked."""
        self._hear()
        return self.decode.quiet(bootstrap_room)

    def teardown(self) -> None:
        """Stop all threads and close all sockets; the pool is SGLang's, which then has the other role.

        Raises:
            KvxferError: The pool may still be written to.
        """
        self._stopped = True
        self._thread.join(4 * TURN_MS / 1000)
        if self.disaggregation_mode == DisaggregationMode.DECODE:
            self._heartbeat_shutdown.set()
        quiet = [rank.close() for rank in self._ranks]
        self._zmq_ctx.destroy(linger=0)
        if not all(quiet):
            raise KvxferError(
                "the KV pool may still be written to: it must be neither freed nor used for other requests"
            )

    # --- what the two parts call ---------------------------------------------------------------------------------------

    def fail(self, room: int, reason: str) -> None:
        """Have SGLang's scheduler treat a request as failed; if there are several reasons, it is told the first."""
        with self.failure_lock:
            self.failure_records.setdefault(room, reason)
        self.update_status(room, KVPoll.Failed)

    def _hear(self) -> None:
        for rank in self._ranks:
            rank.hear()

    def weights(self) -> str:
        """Return SGLang's name for the weights, which changes when they are updated in place."""
        return str(get_serving().weight_version)

    # --- notes -----------------------------------------------------------------------------------------------------

    def tell(self, host: str, port: int, note: PagesOffered | AttemptFailed) -> None:
        """Send a note to a decode rank; if that cannot be reached, log it."""
        address = NetworkAddress(host, port)
        try:
            self._send_multipart_locked(address.to_tcp(), packed(note), is_ipv6=address.is_ipv6)
        except zmq.ZMQError as error:
            log.warning(
                "room %s: a note to the decode server at %s:%s could not be sent: %s", note.room, host, port, error
            )

    def _listen(self, hear: Callable[[list[bytes]], None]) -> None:
        while not self._stopped:
            if not self.server_socket.poll(TURN_MS):
                continue
            try:
                hear(self.server_socket.recv_multipart())
            except PeerError as error:
                self._complain("a message was ignored: %s", error)
            except Exception as error:
                self._complain("a message from a prefill or decode server was ignored: handling it failed: %r", error)
                log.debug("the message was ignored because of this", exc_info=True)

    def _hear_prefill(self, frames: list[bytes]) -> None:
        if frames[0] == ABORT_TAG:
            notice = AbortNotification.from_zmq(frames)
            if notice is not None:
                self.prefill.aborted(notice.room)
            return
        note = unpacked(frames)
        if isinstance(note, PagesWanted):
            self.prefill.wanted(note)
        elif isinstance(note, AttemptFailed):
            self.prefill.given_up(note)

    def _hear_decode(self, frames: list[bytes]) -> None:
        note = unpacked(frames)
        if isinstance(note, PagesOffered):
            self.decode.offered(note)
        elif isinstance(note, AttemptFailed):
            self.decode.failed(note)
