"""Key files: which keys of one are presented and accepted, what is wrong with one that is malformed, and when it is read again."""

from __future__ import annotations

import datetime
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import permutations
from pathlib import Path

import pytest
import typer
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from typer.testing import CliRunner

from kvxfer import keyring
from kvxfer.cli.addresses import settings_problems
from kvxfer.cli.keys import keys
from kvxfer.config import Config
from kvxfer.control import key_watch
from kvxfer.control.sockets import ControlConnection, ControlSockets, address
from kvxfer.errors import ConfigError
from kvxfer.keyfile import KeyFile
from kvxfer.keyring import read_keys
from kvxfer.protocol import messages as m
from kvxfer.security import OPEN, Security, make_key
from kvxfer.testing.engine import until

Files = dict[str, Path]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """Three files with a key each."""
    for name in "abc":
        make_key(tmp_path / name)
    return {name: tmp_path / name for name in "abc"}


def key(files: Files, name: str) -> str:
    """The id of the key that one of the files was made with."""
    return read_keys(files[name]).keys[0].id


def public(files: Files, name: str) -> str:
    return read_keys(files[name]).keys[0].certificate


def joined(path: Path, *texts: str) -> Path:
    path.write_text("".join(texts))
    path.chmod(0o600)
    return path


def signed(
    path: Path, issuer: x509.Name | None = None, signer: ec.EllipticCurvePrivateKey | None = None, until: int = 9999
) -> Path:
    """A file with a new key, which it or the issuer has signed."""
    mine, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "x")])
    dates = (datetime.datetime(2020, 1, 1), datetime.datetime(until, 12, 31))
    leaf = x509.CertificateBuilder(issuer or name, name, mine.public_key(), 7, *dates)
    pem = serialization.Encoding.PEM
    text = mine.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return joined(path, (text + leaf.sign(signer or mine, hashes.SHA256()).public_bytes(pem)).decode())


def security(path: Path) -> Security:
    return Security.of(Config(key_file=str(path)))


def meet(ours: ControlSockets, theirs: ControlSockets, port: int) -> tuple[ControlConnection, list[ControlConnection]]:
    """Dial, and poll both sides until a message has come or the connection is lost; return both ends."""
    connection = ours.dial(address("127.0.0.1", port), None, m.MAX_BYTES)
    connection.send(m.Ping(1))
    came: list[ControlConnection] = []
    deadline = time.monotonic() + 30
    while not came and connection.lost is None:
        assert time.monotonic() < deadline
        for hub in (ours, theirs):
            hub.flush()
            hub.poll(0.005)
            for ready in hub.ready():
                if ready.receive() is not None:
                    came.append(ready)
    return connection, came


@pytest.fixture
def talk() -> Callable[[Security, Security], tuple[ControlConnection, list[ControlConnection]]]:
    def call(ours: Security, theirs: Security) -> tuple[ControlConnection, list[ControlConnection]]:
        a, b = ControlSockets(ours), ControlSockets(theirs)
        try:
            return meet(a, b, b.listen("127.0.0.1", 0))
        finally:
            a.close()
            b.close()

    return call


Talk = Callable[[Security, Security], tuple[ControlConnection, list[ControlConnection]]]


def test_files_with_keys_in_common_let_each_other_in_whatever_their_order(
    files: Files, tmp_path: Path, talk: Talk
) -> None:
    texts = {name: path.read_text() for name, path in files.items()}
    mixed = ["a", "ab", "ba", "b", *("".join(p) for p in permutations("abc"))]
    for here in mixed:
        for there in mixed:
            if here[0] in there and there[0] in here:
                ours = joined(tmp_path / "ours", *(texts[n] for n in here))
                theirs = joined(tmp_path / "theirs", *(texts[n] for n in there))
                connection, came = talk(security(ours), security(theirs))
                assert came, (here, there, connection.lost)
                assert came[0].key_id == key(files, here[0]) and connection.key_id == key(files, there[0])


def test_keys_of_earlier_versions_which_have_one_subject_work_together(
    tmp_path: Path, talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(x509, "NameAttribute", lambda oid, value, real=x509.NameAttribute: real(oid, "kvxfer"))
    for name in "xyz":
        make_key(tmp_path / name)
    texts = [(tmp_path / name).read_text() for name in "xyz"]
    connection, came = talk(
        security(joined(tmp_path / "ours", *texts)), security(joined(tmp_path / "theirs", *reversed(texts)))
    )
    assert came, connection.lost


def test_an_engine_with_a_key_of_its_own_is_let_in_by_its_certificate(files: Files, tmp_path: Path, talk: Talk) -> None:
    a = joined(tmp_path / "one", files["a"].read_text(), public(files, "b"))
    b = joined(tmp_path / "two", public(files, "a"), files["b"].read_text())
    c = joined(tmp_path / "three", files["c"].read_text(), public(files, "a"), public(files, "b"))
    for ours, theirs in ((a, b), (b, a)):
        connection, came = talk(security(ours), security(theirs))
        assert came, connection.lost
    for ours, theirs in ((a, c), (c, a)):
        connection, came = talk(security(ours), security(theirs))
        assert connection.lost and connection.denied and not came
        assert "key (TLS:" in connection.lost


def test_a_key_for_which_an_accepted_key_vouches_is_not_accepted(files: Files, tmp_path: Path, talk: Talk) -> None:
    """Else the holder of a key could make any number of others, and revoking one would not end them."""
    issuer = serialization.load_pem_private_key((read_keys(files["a"]).keys[0].secret or "").encode(), None)
    assert isinstance(issuer, ec.EllipticCurvePrivateKey)
    rogue = signed(tmp_path / "rogue", x509.load_pem_x509_certificate(public(files, "a").encode()).subject, issuer)
    joined(rogue, rogue.read_text(), public(files, "a"))
    for ours, theirs in ((rogue, files["a"]), (files["a"], rogue)):
        connection, came = talk(security(ours), security(theirs))
        assert connection.lost and not came


# --- files that are wrong ------------------------------------------------------------------------------------------


def test_what_is_wrong_with_a_file_is_said_with_its_line(files: Files, tmp_path: Path) -> None:
    a, b = (files[name].read_text() for name in "ab")
    secret, certificate = (read_keys(files["a"]).keys[0].secret or ""), public(files, "a")
    lines = a.count("\n")
    cases = {
        a + "rubbish\n": f"line {lines + 1} is neither part of a key nor a comment",
        a + b[: len(b) - 30]: f"certificate that begins in line {lines + 1 + secret.count(chr(10))} is cut off",
        secret + b: "private key that begins in line 1 is not followed by its certificate",
        a + secret: f"private key that begins in line {lines + 1} is not followed by its certificate",
        certificate: "holds no private key",
        secret
        + public(files, "b"): "private key that begins in line 1 is damaged, or does not belong to the certificate",
        a
        + (read_keys(files["b"]).keys[0].secret or "")
        + public(files, "c"): f"begins in line {lines + 1} is damaged, or",
        a + certificate.replace("MII", "MI"): f"certificate that begins in line {lines + 1} is damaged",
        a + certificate.replace("MIIB", "AAAA"): f"certificate that begins in line {lines + 1} is damaged",
        a.replace("PRIVATE KEY", "ENCRYPTED PRIVATE KEY"): "line 1 is encrypted",
        a + b.replace("CERTIFICATE", "PUBLIC KEY"): "begins a public key: only private keys and certificates",
        a.rstrip("\n") + b: "is cut off|neither part",
        "": "holds no private key",
    }
    for number, (text, said) in enumerate(cases.items()):
        path = joined(tmp_path / f"wrong{number}", text)
        with pytest.raises(ConfigError, match=said) as caught:
            security(path)
        assert str(path) in str(caught.value)


def test_comments_and_empty_lines_are_taken_and_kept(files: Files, tmp_path: Path) -> None:
    path = joined(
        tmp_path / "key", "# ours\n", files["a"].read_text(), "\r\n\n# theirs: prefill-2\n", public(files, "b")
    )
    assert security(path)
    found = read_keys(path)
    assert [k.id for k in found.keys] == [key(files, "a"), key(files, "b")]
    assert "# theirs: prefill-2" in found.text and KeyFile.parse(found.text) == KeyFile.parse(
        KeyFile.parse(found.text).text
    )


@pytest.mark.parametrize(
    "mode, said",
    [
        (0o640, ["read by its group"]),
        (0o620, ["changed by its group"]),
        (0o660, ["read and changed by its group"]),
        (0o604, ["read by every user"]),
        (0o602, ["changed by every user"]),
        (0o666, ["read and changed by its group", "read and changed by every user"]),
        (0o600, []),
        (0o711, []),
    ],
)
def test_rights_of_others_are_remarked_on_once(
    files: Files, mode: int, said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    files["a"].chmod(mode)
    kept = [security(files["a"]) for _ in range(3)]
    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warned) == len(said) and kept
    for text, words in zip(warned, said, strict=True):
        assert words in text and "chmod 600" in text and str(files["a"]) in text


def test_doctor_refuses_a_key_whose_dates_are_over(files: Files, tmp_path: Path) -> None:
    old = signed(tmp_path / "old", until=2021)
    [problem] = settings_problems(Config(key_file=str(old)))
    assert f"key {read_keys(old).keys[0].id} is refused (certificate has expired)" in problem
    assert not settings_problems(Config(key_file=str(files["a"])))


# --- read again ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["replace", "write", "link"])
def test_a_file_that_has_changed_counts_for_the_next_connection(files: Files, tmp_path: Path, how: str) -> None:
    """However it is changed: also within the file system's clock tick, to the same length, or by a link that leads elsewhere."""
    texts = [files[name].read_text() for name in "ab"]
    path = tmp_path / "key"
    old, new = joined(tmp_path / "old", *texts), joined(tmp_path / "new", *reversed(texts))
    if how == "link":
        path.symlink_to(old)
    else:
        joined(path, *texts)
    hub, peer = ControlSockets(security(path)), ControlSockets(security(files["a"]))
    other = ControlSockets(security(joined(tmp_path / "both", *texts)))
    try:
        port = hub.listen("127.0.0.1", 0)
        for i in range(6):
            texts.reverse()
            if how == "replace":
                joined(tmp_path / "next", *texts).replace(path)
            elif how == "write":
                joined(path, *texts)
            else:
                (tmp_path / "next").symlink_to(new if i % 2 == 0 else old)
                (tmp_path / "next").replace(path)
            presented = key(files, "ba"[i % 2])
            connection, came = meet(other, hub, port)
            assert came and connection.key_id == presented, connection.lost
    finally:
        for sockets in (hub, peer, other):
            sockets.close()


def test_keys_are_read_while_the_sockets_go_on(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading six hundred takes a tenth of a second and more."""
    path, more = joined(tmp_path / "key", files["a"].read_text()), public(files, "b")
    hub, other = ControlSockets(security(path)), ControlSockets(security(files["a"]))
    readers, read = list[threading.Thread](), KeyFile.parse

    def parse(text: str) -> KeyFile:
        readers.append(threading.current_thread())
        return read(text)

    try:
        port = hub.listen("127.0.0.1", 0)
        monkeypatch.setattr(KeyFile, "parse", parse)
        with path.open("a") as file:
            file.write(more)
        connection, came = meet(other, hub, port)
        assert came, connection.lost
        assert readers and threading.current_thread() not in readers
    finally:
        hub.close()
        other.close()


@pytest.mark.parametrize("broken", ["empty", "nonsense", "half", "gone", "folder", "pipe", "binary"])
def test_a_file_that_has_become_unusable_changes_nothing_and_is_logged_once(
    files: Files, tmp_path: Path, broken: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_watch, "KEYS_S", 0.02)
    monkeypatch.setattr(keyring, "BROKEN_S", 0.1)
    path = joined(tmp_path / "key", files["a"].read_text())
    hub, other = ControlSockets(security(path)), ControlSockets(security(files["a"]))
    try:
        port = hub.listen("127.0.0.1", 0)
        path.unlink()
        match broken:
            case "folder":
                path.mkdir()
            case "pipe":
                os.mkfifo(path)
            case "gone":
                pass
            case _:
                half = files["b"].read_text()[:300].encode()
                path.write_bytes(
                    {"empty": b"", "nonsense": b"-----BEGIN X-----", "half": half, "binary": b"\xff\0"}[broken]
                )

        def goes_on() -> list[str]:
            connection, came = meet(other, hub, port)
            assert came, connection.lost
            other.drop(connection)
            hub.poll(0.05)
            return [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]

        until(goes_on)
        for _ in range(5):
            errors = goes_on()
        assert len(errors) == 1 and str(path) in errors[0] and "stay in use" in errors[0], errors
        if broken == "folder":
            path.rmdir()
        elif broken != "gone":
            path.unlink()
        joined(path, files["b"].read_text())
        connection, came = meet(other, hub, port)
        assert connection.denied and not came
    finally:
        hub.close()
        other.close()


def test_a_key_that_is_taken_out_ends_what_its_holder_has_open(files: Files, tmp_path: Path) -> None:
    path = joined(tmp_path / "key", files["a"].read_text(), public(files, "b"), public(files, "c"))
    hub = ControlSockets(security(path))
    both = [
        ControlSockets(security(joined(tmp_path / f"with {name}", files[name].read_text(), public(files, "a"))))
        for name in "bc"
    ]
    try:
        port = hub.listen("127.0.0.1", 0)
        (stays, _), (goes, _) = (meet(sockets, hub, port) for sockets in both)
        joined(tmp_path / "next", files["a"].read_text(), public(files, "b")).replace(path)
        until(lambda: [sockets.poll(0.05) for sockets in (hub, *both)] and goes.lost is not None)
        assert stays.lost is None
        again, came = meet(both[1], hub, port)
        assert again.denied and "does not accept this engine's key" in str(again.lost) and not came
    finally:
        for sockets in (hub, *both):
            sockets.close()


# --- the program ---------------------------------------------------------------------------------------------------


def run(*arguments: object) -> str:
    app = typer.Typer()
    app.command()(keys)
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception is not None:
        raise result.exception
    return result.output


def test_what_waits_for_keys_goes_on_when_they_are_read(files: Files, tmp_path: Path) -> None:
    """Not when the thread that has read them has ended, too: nothing wakes the sockets then, and each handshake took up to a second."""
    begun, woken, over = list[bool](), threading.Event(), threading.Event()

    def wake() -> None:
        woken.set()
        over.wait(30.0)

    watch = key_watch.KeyWatch(security(joined(tmp_path / "key", files["a"].read_text())), wake)
    watch.when_read(lambda: begun.append(True))
    assert woken.wait(30.0)
    list(watch.turn(()))
    over.set()
    assert begun


def test_keys_that_are_read_just_after_the_look_at_them_are_not_slept_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that has read them wakes the sockets between that look and their sleep."""
    sockets, turn = ControlSockets(OPEN), key_watch.KeyWatch.turn

    def turned(watch: key_watch.KeyWatch, connections: Iterable[ControlConnection]) -> Iterator[ControlConnection]:
        yield from turn(watch, connections)
        sockets.wake()

    monkeypatch.setattr(key_watch.KeyWatch, "turn", turned)
    asleep = threading.Thread(target=sockets.poll, args=(600.0,), daemon=True)
    asleep.start()
    asleep.join(10.0)
    slept = asleep.is_alive()
    sockets.wake()
    asleep.join(10.0)
    sockets.close()
    assert not slept


def test_the_program_replaces_a_key_in_three_steps(files: Files, tmp_path: Path) -> None:
    path, new = joined(tmp_path / "key", files["a"].read_text()), key(files, "b")
    path.chmod(0o640)
    assert "presented" in run(path, "show") and key(files, "a") in run(path, "show")
    run(path, "accept", files["b"])
    run(path, "accept", files["b"])  # twice is once
    assert [k.id for k in read_keys(path).keys] == [key(files, "a"), new]
    run(path, "first", new[:6])
    assert [k.id for k in read_keys(path).keys] == [new, key(files, "a")]
    link = tmp_path / "link"
    link.symlink_to(path)
    run(link, "drop", key(files, "a"))
    assert path.read_text() == files["b"].read_text() and link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640 and sorted(os.listdir(tmp_path)) == ["a", "b", "c", "key", "link"]


def test_the_program_makes_keys(tmp_path: Path) -> None:
    said = run(tmp_path / "key")
    assert "key_file" in said and security(tmp_path / "key").keys is not None


def test_a_file_that_is_edited_is_readable_by_nobody_else_meanwhile(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who opens it before it has its rights reads what is written later."""
    seen, before = list[int](), os.umask(0)
    monkeypatch.setattr(os, "fchmod", lambda descriptor, mode: seen.append(os.fstat(descriptor).st_mode))
    try:
        run(files["a"], "accept", files["b"])
    finally:
        os.umask(before)
    assert [stat.S_IMODE(mode) for mode in seen] == [0o600]


def test_the_program_says_what_it_cannot_do(files: Files, tmp_path: Path) -> None:
    before = files["a"].read_text()
    with pytest.raises(ConfigError, match="only private key"):
        run(files["a"], "drop", key(files, "a"))
    with pytest.raises(ConfigError, match="0 keys of the file have a name that begins with 'none'"):
        run(files["a"], "first", "none")
    with pytest.raises(ConfigError, match="needs a file"):
        run(files["a"], "accept")
    with pytest.raises(ConfigError, match="takes nothing after it"):
        run(files["a"], "show", "x")
    with pytest.raises(ConfigError, match="holds no key"):
        run(files["a"], "accept", joined(tmp_path / "empty"))
    run(files["a"], "accept", joined(tmp_path / "b.pub", run(files["b"], "public")))
    with pytest.raises(ConfigError, match="cannot be presented"):
        run(files["a"], "first", key(files, "b"))
    os.mkfifo(tmp_path / "pipe")  # opening it would take until somebody writes
    for nothing in (tmp_path / "nowhere", tmp_path / "pipe", tmp_path, "/dev/zero"):
        with pytest.raises(ConfigError, match="cannot read the key"):
            run(nothing, "show")
    assert files["a"].read_text() == before + public(files, "b")
