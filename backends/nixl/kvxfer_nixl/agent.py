"""A NIXL agent with one plugin. Every method raises ``TransportError`` in place of NIXL's own errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import ConfigError, TransportError
from kvxfer.geometry.region import Region
from kvxfer.settings import advice
from kvxfer_nixl import ucx
from kvxfer_nixl.gate import inside, keep
from kvxfer_nixl.library import Library, load
from kvxfer_nixl.metadata import name_in, renamed
from kvxfer_nixl.options import Options, text
from kvxfer_nixl.rest import come_to_rest, threads

DescriptorRows = NDArray[np.uint64]
"""Descriptors, C-contiguous ``[n, 3]``: address, bytes, device."""

Side = tuple[bool, DescriptorRows]
"""Descriptors, and whether they lie in GPU memory."""

PROGRESS_US = 100_000
"""The progress thread sleeps on UCX's descriptor, and wakes by itself after this time in case an event was lost. It then
spins for the lock that a running copy holds: with 10 ms, CMA copies are half as fast. With 0, the default, it spins."""

REST_S = 2.0
"""How long ``close`` waits for NIXL's threads to come to rest."""

# What UCX's plugin reads beside what it lists; and what it lists but never reads, or must not be told.
_UCX_UNLISTED = ("device_list", "split_batch_size", "ucx_num_device_channels")
_REFUSED = {
    ("UCX", "ucx_devices"): "NIXL lists it and never reads it; use 'device_list'",
    ("UCX", "num_threads"): "use the option 'num_threads'",
    ("UCX", "engine_config"): "use the option 'ucx'",
}
_THREADS = {"UCX": "num_threads", "LIBFABRIC": "num_threads", "UCCL": "num_cpus"}


class LibraryAgent:
    """``name``: what peers call it.

    It has one progress thread of NIXL's, which sleeps. One thread at a time, save ``prepare`` and ``post``, which as
    many may call as the options say.
    """

    def __init__(self, name: str, options: Options, settings: Mapping[str, str]) -> None:
        """Start the agent, with settings of UCX, which are what has become of the options.

        Raises:
            ConfigError: This NIXL lacks the plugin, or a parameter.
            TransportError: It cannot start.
        """
        self._name = name.encode()
        self._library = library = load(options.log_level)
        self._nixl = nixl = library.bindings
        self._errors = library.errors
        config = nixl.nixlAgentConfig()
        config.useProgThread, config.pthrDelay = True, PROGRESS_US
        config.useListenThread = False
        config.syncMode = getattr(nixl, f"NIXL_THREAD_SYNC_{options.locking.upper()}")
        ucx.check(options.given_settings, library.ucp)
        with self._calling(lambda why: f"NIXL cannot make an agent: {why}"):
            agent = nixl.nixlAgent(name, config)
        self.plugins = tuple(agent.getAvailPlugins())
        parameters = _parameters(agent, library, options)
        others = threads()

        def failed(why: str) -> str:
            plugin = options.plugin
            return (
                f"NIXL's plugin {plugin} cannot start with parameters {parameters} and UCX settings {settings}: {why}"
            )

        with self._calling(failed), ucx.applied(settings) as applied:
            handle = agent.createBackend(options.plugin, parameters | applied)
            self.kinds = frozenset(agent.getBackendParams(handle)[1]) & {"DRAM_SEG", "VRAM_SEG"}
        self._agent: Any = agent
        # NIXL's, of which UCX's must rest before the end; those of other plugins may spin. Another one that was started just
        # then does no harm.
        self._threads = threads() - others if options.plugin == "UCX" else frozenset()
        inside.before_the_end(self._drop)
        self._segments = (nixl.DRAM_SEG, nixl.VRAM_SEG)
        self._operations = {"read": nixl.NIXL_READ, "write": nixl.NIXL_WRITE}
        try:
            agent.getLocalMD()
        except self._errors as e:
            raise ConfigError(
                f"NIXL's plugin {options.plugin} moves bytes between memory and storage, not between agents; use UCX"
            ) from e

    @contextmanager
    def _calling(self, failed: Callable[[str], str] = str) -> Iterator[None]:
        """Be inside NIXL; ``failed`` makes the text of an error of what NIXL says. Calls that are made often do without."""
        try:
            with inside:
                yield
        except self._errors as e:
            raise TransportError(failed(self._library.explain(e))) from e

    def register(self, regions: Sequence[Region], cuda: bool, device: int) -> Any:
        """Register regions, which lie on one device; return what ``deregister`` takes."""
        pieces = [(r.address, r.nbytes, device, "") for r in regions]
        where = f"cuda:{device}" if cuda else "cpu"
        with self._calling(lambda why: f"NIXL cannot register {len(pieces)} regions on {where}: {why}"):
            token = self._nixl.nixlRegDList(self._segments[cuda], pieces)
            self._agent.registerMem(token, [])
        return token

    def deregister(self, token: Any) -> None:
        with self._calling(lambda why: f"NIXL cannot deregister memory: {why}"):
            self._agent.deregisterMem(token, [])

    def metadata(self, *tokens: Any) -> bytes:
        """Return what a peer has to ``add``: how to reach this agent, and memory of it.

        Args:
            tokens: What ``register`` returned for that memory; of several, all that is registered is told.
        """
        few = self._nixl.nixlRegDList(self._segments[0], []) if not tokens else tokens[0]
        with self._calling(lambda why: f"NIXL cannot describe this agent: {why}"):
            return bytes(self._agent.getLocalMD() if len(tokens) > 1 else self._agent.getLocalPartialMD(few, True, []))

    def add(self, metadata: bytes) -> str:
        """Make a peer known, and return its name here, which is the same for the same metadata only.

        Raises:
            TransportError: NIXL does not take them, or they are this agent's.
        """
        claimed = name_in(metadata)
        if claimed == self._name:
            raise TransportError("it has sent the metadata of this side itself")
        if not claimed and name_in(self.metadata()) == self._name:
            raise TransportError(
                "it has sent what are no metadata of a NIXL agent",
                advice="install the same release of NIXL on both sides",
            )
        # A release that writes them in another way keeps the names that agents choose.
        name, known = renamed(metadata) if claimed else ("", metadata)
        with self._calling():
            loaded = self._agent.loadRemoteMD(known)
        return name or (loaded.decode() if isinstance(loaded, bytes) else str(loaded))

    def remove(self, name: str) -> None:
        """Forget a peer. No fence: what is in flight goes on."""
        with suppress(*self._errors):  # NIXL forgets it by itself when a connection fails
            with inside:
                self._agent.invalidateRemoteMD(name)

    def tell(self, name: str, message: str) -> None:
        """Send a short message to a peer. Returns at once, or fails if the connection is known to have failed."""
        with self._calling():
            self._agent.genNotif(name, message)

    def heard(self) -> Iterator[bytes]:
        """Yield the messages that have come, from anybody.

        Raises:
            TransportError: NIXL cannot say.
        """
        try:
            with inside:
                found = self._agent.getNotifs({}, [])
        except self._errors as e:
            raise TransportError(f"NIXL cannot receive: {self._library.explain(e)}") from e
        for messages in found.values():
            yield from messages

    def prepare(self, operation: Literal["read", "write"], local: Side, remote: Side, name: str) -> int:
        """Make a transfer, and return a handle to ``post`` and to ``release``.

        Raises:
            TransportError: NIXL refuses.
        """
        nixl = self._nixl
        try:
            here, there = (nixl.nixlXferDList(self._segments[cuda], rows) for cuda, rows in (local, remote))
            with inside:
                return int(self._agent.createXferReq(self._operations[operation], here, there, name, "", []))
        except self._errors as e:
            raise TransportError(self._library.explain(e)) from e

    def post(self, handle: int) -> bool:
        """Start a transfer, once; return whether it is done. Over CMA it always is: the call copies.

        Raises:
            TransportError: It cannot be started.
        """
        try:
            with inside:
                return bool(self._agent.postXferReq(handle, "") == self._nixl.NIXL_SUCCESS)
        except self._errors as e:
            raise TransportError(self._library.explain(e)) from e

    def done(self, handle: int) -> bool:
        """Return whether the bytes are visible at the target.

        Raises:
            TransportError: They will not be.
        """
        try:
            with inside:
                return bool(self._agent.getXferStatus(handle) == self._nixl.NIXL_SUCCESS)
        except self._errors as e:
            raise TransportError(self._library.explain(e)) from e

    def release(self, handle: int) -> None:
        """Forget a handle. No fence: if it is not done, bytes may go on landing until ``close``."""
        with suppress(*self._errors):  # what it cannot cancel it keeps until the agent goes
            with inside:
                self._agent.releaseXferReq(handle)

    def close(self) -> None:
        """End the agent, its threads and its connections. Nothing lands in this process's memory afterwards.

        Raises:
            TransportError: NIXL would never come back from that. The agent stays until the process ends.
        """
        inside.forget(self._drop)
        if not self._drop():
            raise TransportError(
                f"NIXL cannot be closed: its progress thread did not come to rest within {REST_S:g} s. Most likely a peer of this host "
                "has stopped or died",
                advice="restart this process: until then its memory stays out of use, and that thread keeps a core busy",
            )

    def _drop(self) -> bool:
        """Destroy the agent, unless that would take for ever; return whether it is no more."""
        agent, self._agent = self._agent, None
        if agent is None or come_to_rest(self._threads, REST_S):
            return True
        keep(agent)
        return False


def _parameters(agent: Any, library: Library, options: Options) -> dict[str, str]:
    """Return what to give the plugin, checked: NIXL ignores parameters it does not know."""
    plugin, plugins = options.plugin, list(agent.getAvailPlugins())
    build = f"NIXL {library.version} ({library.package})"
    if plugin not in plugins:
        raise ConfigError(
            f"{build} has no plugin {plugin!r}: {advice(plugin, plugins)} (others need a NIXL built from source with them)"
        )
    try:
        listed = agent.getPluginParams(plugin)[0]
    except library.errors as e:
        raise ConfigError(
            f"plugin {plugin!r} of {build} cannot be loaded here: {library.why_unloadable(plugin)}"
        ) from e
    known = {*listed, *(_UCX_UNLISTED if plugin == "UCX" else ())}
    for key in options.plugin_params:
        if (plugin, key) in _REFUSED:
            raise ConfigError(f"plugin parameter {key!r} of back end 'nixl': {_REFUSED[plugin, key]}")
        if key not in known:
            shown = known - {k for p, k in _REFUSED if p == plugin}
            raise ConfigError(f"NIXL's plugin {plugin} has no parameter {key!r}: {advice(key, shown)}")
    given = {key: text(value) for key, value in options.plugin_params.items()}
    if given.get("ucx_error_handling_mode", "peer") != "peer":
        raise ConfigError(
            "plugin parameter 'ucx_error_handling_mode' must be 'peer': without it UCX never tells that a peer has died"
        )
    if options.num_threads:
        if plugin not in _THREADS:
            raise ConfigError(f"option 'num_threads' of back end 'nixl' does nothing for plugin {plugin!r}")
        given[_THREADS[plugin]] = str(options.num_threads)
    if options.posting > 1:
        given.setdefault("num_workers", str(options.posting))  # a worker serves one thread at a time
    return given
