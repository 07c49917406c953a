"""Keys and allow-lists: those who have the key work together, everybody else gets nothing, and nothing can be said twice."""

from __future__ import annotations

import socket
import ssl
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from kvxfer.config import Config
from kvxfer.errors import ConfigError, PeerError, TransportError
from kvxfer.failures import FailureKind
from kvxfer.identity import Source, TransferId
from kvxfer.protocol import messages as m
from kvxfer.protocol.messages import Named, Renew
from kvxfer.protocol.values import Ended
from kvxfer.security import Security, make_key
from kvxfer.testing.engine import AgentEngine, PagedMemory, until
from kvxfer.values import BlockTable, Fetch, Offer
from tests.control.stranger import Stranger
from tests.relay import Relay

T = TransferId("own/1/secret", 0)


@pytest.fixture
def key(tmp_path: Path) -> str:
    make_key(tmp_path / "key")
    return str(tmp_path / "key")


CONFIG = {"backend_options": {"verbs": ["read"]}, "transfer_timeout": 20.0, "peer_timeout": 10.0}


@pytest.fixture
def engine() -> Iterator[Callable[..., AgentEngine]]:
    made: list[AgentEngine] = []

    def make(**settings: object) -> AgentEngine:
        made.append(AgentEngine(CONFIG | settings, PagedMemory(seed=1), name="e"))
        return made[-1]

    yield make
    for e in made:
        e.close()


def outcome(p: AgentEngine, d: AgentEngine, source: Source | None = None) -> Ended:
    table = BlockTable.of([[3]])
    p.agents[0].offer(Offer(T, b"d", 1, 4, table, True))
    d.agents[0].fetch(Fetch("r", T, b"d", source or p.directory.source, table, 0, 4))
    return d.over("r", 40.0)


# --- the key -------------------------------------------------------------------------------------------------------


def test_keys_are_written_for_their_owner_and_never_over_another(tmp_path: Path) -> None:
    path = tmp_path / "key"
    make_key(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    before = path.read_text()
    with pytest.raises(ConfigError, match="File exists"):
        make_key(path)
    assert path.read_text() == before
    with pytest.raises(ConfigError, match="set 'key_file' to it if it is this deployment's key, else name a file"):
        make_key(path)
    with pytest.raises(ConfigError, match="No such file or directory; name a file in a folder that exists"):
        make_key(tmp_path / "nowhere" / "key")
    make_key(tmp_path / "other")
    assert (tmp_path / "other").read_text() != before


@pytest.mark.parametrize(
    "content", [None, b"", b"secret", b"kvxfer-key-1 short", b"\xff\xfe", b"-----BEGIN PRIVATE KEY-----\n"]
)
def test_what_is_no_key_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="key"):
        Security.of(Config(key_file=str(path)))


def test_listening_beyond_this_host_without_a_key_is_remarked_on(caplog: pytest.LogCaptureFixture, key: str) -> None:
    assert Config().listen == "127.0.0.1"
    for listen in ("127.0.0.1", "::1", "localhost"):
        Security.of(Config(listen=listen, advertise="node-7"))
    Security.of(Config(listen="0.0.0.0", advertise="node-7", key_file=key))
    assert not [r for r in caplog.records if r.name == "kvxfer.security"]
    Security.of(Config(listen="0.0.0.0", advertise="node-7"))
    assert "without a key" in caplog.text


# --- authentication ------------------------------------------------------------------------------------------------


def test_engines_without_the_same_key_do_not(engine: Callable[..., AgentEngine], key: str, tmp_path: Path) -> None:
    make_key(tmp_path / "other")
    settings = [{"key_file": key}, {"key_file": str(tmp_path / "other")}, {}]
    for mine in settings:
        for theirs in settings:
            if mine != theirs:
                end = outcome(engine(**mine), engine(**theirs))
                assert end.outcome.kind is FailureKind.REFUSED, (mine, theirs, end)


def ask(port: int, context: ssl.SSLContext | None) -> m.Message | None:
    """What a directory answers to a lookup, if it does."""
    with suppress(OSError), Stranger(f"tcp://127.0.0.1:{port}", 10.0) as s:
        if context is not None:
            s.socket = context.wrap_socket(s.socket)
        s.say(m.Lookup(m.PROTOCOL))
        return s.answer()
    return None


def client(key: str | None, **options: object) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if key is not None:
        context.load_cert_chain(key)
    for name, value in options.items():
        setattr(context, name, value)
    return context


def test_only_those_who_hold_the_key_are_answered(engine: Callable[..., AgentEngine], key: str, tmp_path: Path) -> None:
    """Whatever they know of it: its certificate is shown to everybody who asks."""
    make_key(tmp_path / "other")
    port = engine(key_file=key).directory.source.port
    assert isinstance(ask(port, client(key)), m.EngineDescriptor)
    assert ask(port, None) is None
    assert ask(port, client(None)) is None
    assert ask(port, client(str(tmp_path / "other"))) is None
    assert ask(port, client(key, maximum_version=ssl.TLSVersion.TLSv1_2)) is None
    # The certificate of the deployment, with a secret of one's own, is not even taken by one's own library.
    secret = (tmp_path / "other").read_text().partition("-----BEGIN CERTIFICATE-----")[0]
    certificate = Path(key).read_text().partition("-----BEGIN CERTIFICATE-----")
    (tmp_path / "mixed").write_text(secret + certificate[1] + certificate[2])
    with pytest.raises(ssl.SSLError):
        client(str(tmp_path / "mixed"))


def test_who_dials_takes_nobody_without_the_key_for_a_producer(
    engine: Callable[..., AgentEngine], key: str, tmp_path: Path
) -> None:
    """Nothing is said to them, not even a question."""
    make_key(tmp_path / "other")
    heard: list[bytes] = []
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "other")
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with suppress(OSError):
            while True:
                sock, _ = listener.accept()
                with suppress(OSError):
                    heard.append(server.wrap_socket(sock, server_side=True).recv(1000))

    threading.Thread(target=serve, daemon=True).start()
    d = engine(key_file=key)
    end = outcome(engine(key_file=key), d, Source("127.0.0.1", listener.getsockname()[1], 7))
    listener.shutdown(socket.SHUT_RDWR)  # closing alone leaves the thread in ``accept``
    listener.close()
    assert end.outcome.kind is FailureKind.REFUSED and not any(heard)


def test_what_was_overheard_cannot_be_said_again(engine: Callable[..., AgentEngine], key: str) -> None:
    """A notice to a directory, recorded on its way and sent again on another connection."""
    p, d = engine(key_file=key), engine(key_file=key)
    target = ("127.0.0.1", p.directory.source.port)
    relay = Relay(f"tcp://127.0.0.1:{target[1]}")
    notice = Renew(p.directory.source.epoch, (Named(T, b"d"),))
    d.directory.tell(Source("127.0.0.1", relay.port, p.directory.source.epoch), notice)
    until(lambda: p.directory.notices() == [notice])
    heard = bytes(relay.asked)
    assert m.encode(notice) not in heard, "it was readable on its way"
    with socket.create_connection(target) as again:
        again.sendall(heard)
        again.settimeout(1.0)
        with suppress(TimeoutError, ConnectionError):
            while again.recv(65536):
                pass
    assert not p.directory.notices()
    relay.close()


# --- the list ------------------------------------------------------------------------------------------------------


def test_who_is_in_the_list_is_welcome(engine: Callable[..., AgentEngine], key: str) -> None:
    """From any port of its own."""
    for settings in ({}, {"key_file": key}):
        end = outcome(engine(peers=["127.0.0.1:9"], **settings), engine(peers=["127.0.0.0/8"], **settings))
        assert end.outcome.delivered, end


def test_who_is_not_in_the_list_is_turned_away(
    engine: Callable[..., AgentEngine], key: str, caplog: pytest.LogCaptureFixture
) -> None:
    for settings in ({}, {"key_file": key}):
        end = outcome(engine(peers=["10.0.0.0/8"], **settings), engine(transfer_timeout=1.0, **settings))
        assert end.outcome.kind is FailureKind.PEER_UNREACHABLE, end
    assert "not in the list" in caplog.text


def test_who_is_not_in_the_list_is_not_dialled(engine: Callable[..., AgentEngine]) -> None:
    end = outcome(engine(), engine(peers=["10.0.0.0/8", "192.0.2.7"]))
    assert end.outcome.kind is FailureKind.REFUSED


# --- what a back end dials -----------------------------------------------------------------------------------------


class Knocked:
    """Somebody who listens at an address, and hears whether anybody connects."""

    def __init__(self, host: str) -> None:
        self.socket = socket.create_server((host, 0))
        self.socket.settimeout(0.5)
        self.port = self.socket.getsockname()[1]

    @property
    def heard(self) -> bool:
        try:
            self.socket.accept()[0].close()
        except TimeoutError:
            return False
        finally:
            self.socket.close()
        return True


BACKENDS = pytest.mark.parametrize("backend", ["tcp", "zmq"])


@BACKENDS
def test_an_endpoint_names_a_host_that_is_not_in_the_list(engine: Callable[..., AgentEngine], backend: str) -> None:
    elsewhere = {"listen": "127.0.0.2"}
    p = engine(backend=backend, backend_options=elsewhere)
    d = engine(backend=backend, backend_options={}, peers=["127.0.0.1"])
    failure = outcome(p, d).outcome.failure
    assert failure is not None and failure.kind is FailureKind.REFUSED
    assert "it would dial '127.0.0.2', which is not in the list of allowed peers" in failure.detail
    listed = engine(backend=backend, backend_options={}, peers=["127.0.0.1", "127.0.0.2:9"])
    assert outcome(p, listed).outcome.delivered, (
        "a back end's own port is any, so an entry's port does not count for it"
    )


def test_a_producer_dials_no_consumer_elsewhere_either(engine: Callable[..., AgentEngine]) -> None:
    p = engine(backend="zmq", backend_options={}, peers=["127.0.0.1"])
    d = engine(backend="zmq", backend_options={"listen": "127.0.0.2"})
    failure = outcome(p, d).outcome.failure
    assert failure is not None and failure.kind is FailureKind.REFUSED and "127.0.0.2" in failure.detail


@BACKENDS
def test_nobody_is_knocked_at(
    engine: Callable[..., AgentEngine], monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    victim = Knocked("127.0.0.2")
    p = engine(backend=backend, backend_options={"advertise": "127.0.0.2"})
    monkeypatch.setattr(
        f"kvxfer_{backend}.transport.{backend.capitalize()}Transport.make_endpoint", _naming(p, victim.port)
    )
    d = engine(backend=backend, backend_options={}, peers=["127.0.0.1"])
    assert not outcome(p, d).outcome.delivered
    assert not victim.heard


def _naming(p: AgentEngine, port: int) -> Callable[..., object]:
    """Make endpoints that name a port of somebody else at the host that ``p`` names."""
    import msgspec

    from kvxfer_tcp.transport import TcpTransport
    from kvxfer_zmq.transport import ZmqTransport

    originals = {kind: kind.make_endpoint for kind in (TcpTransport, ZmqTransport)}

    def make(self: TcpTransport | ZmqTransport, memories: object, writable: bool) -> object:
        mine = originals[type(self)](self, memories, writable)
        if "127.0.0.2" not in mine.hosts:
            return mine
        if isinstance(self, TcpTransport):
            return msgspec.structs.replace(mine, port=port)
        return msgspec.structs.replace(mine, address=f"tcp://127.0.0.2:{port}")

    return make


@BACKENDS
def test_where_the_peer_itself_is_met_its_back_end_may_be_too(engine: Callable[..., AgentEngine], backend: str) -> None:
    p = engine(backend=backend, backend_options={"advertise": "127.0.0.1"}, advertise="localhost")
    d = engine(backend=backend, backend_options={}, peers=["localhost"])
    source = Source("localhost", p.directory.source.port, p.directory.source.epoch)
    assert outcome(p, d, source).outcome.delivered, "the list names the host, the endpoint its address"


@pytest.mark.parametrize("host", ["127.1", "0x7f000001", "::ffff:10.0.0.1", "fe80::1%eth0", "a\nb", "", "127.0.0.1 "])
def test_odd_ways_to_write_a_host_are_covered_by_no_entry(host: str) -> None:
    with pytest.raises(PeerError, match="which is not in the list of allowed peers"):
        Security(None, ("127.0.0.0/8", "10.0.0.0/8", "10.0.0.1")).check_host(host, "127.0.0.1")


@pytest.mark.parametrize("host", ["evil.example", "127.1", "", "10.0.0.1:5"])
def test_without_a_list_addresses_are_dialled_and_no_names(host: str) -> None:
    """What a peer tells is not looked up."""
    for address in ("10.0.0.1", "::1", "[::1]"):
        Security().check_host(address, "127.0.0.1")
    with pytest.raises(PeerError, match="which is no address"):
        Security().check_host(host, "127.0.0.1")


def test_a_file_is_opened_only_by_whoever_uses_files() -> None:
    from kvxfer_zmq.endpoint import Endpoint
    from kvxfer_zmq.transport import ZmqTransport

    ours = ZmqTransport("a", {})
    try:
        theirs = Endpoint("b", "ipc:///tmp/kvxfer-zmq-x/inbox", b"t" * 16)
        with pytest.raises(TransportError, match="is reached over ipc"):
            ours.connect(ours.endpoint(), theirs.encode())
        for odd in ("ipc:///run/docker.sock", "tcp://10.0.0.1:5;10.0.0.2:5", "inproc://x", "tcp://a/b:1"):
            with pytest.raises(TransportError, match="not an endpoint of back end 'zmq'"):
                ours.connect(ours.endpoint(), Endpoint("b", odd, b"t" * 16).encode())
    finally:
        ours.close()


def test_a_directory_that_names_ranks_elsewhere_has_them_not_dialled(engine: Callable[..., AgentEngine]) -> None:
    victim = Knocked("127.0.0.2")
    p, d = engine(), engine(peers=["127.0.0.1"])
    p.directory.publish((msgspec.structs.replace(p.agents[0].descriptor, address=f"tcp://127.0.0.2:{victim.port}"),))
    failure = outcome(p, d).outcome.failure
    assert failure is not None and failure.kind is FailureKind.REFUSED and not victim.heard


def test_nobody_elsewhere_is_told_of_requests(engine: Callable[..., AgentEngine]) -> None:
    victim = Knocked("127.0.0.2")
    d = engine(peers=["127.0.0.1"])
    d.directory.tell(Source("127.0.0.2", victim.port, 1), Renew(1, (Named(T, b"d"),)))
    assert not victim.heard
