"""Ids of one request, however two engines dress it up, must meet; those of two requests must not."""

import pickle
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvxfer.identity import Address, IdentityError, TransferId, allowed, digest, key, new_epoch, parse_address

# External ids, with a bias to those that look as if an engine had had its hands on them.
externals = (
    st.lists(
        st.one_of(
            st.sampled_from(["cmpl-", "chatcmpl-", "generate-tokens-", "0_", "12_", "-0", "-7", "-deadbeef"]),
            st.text(max_size=5),
            st.uuids().map(str),
        ),
        min_size=1,
        max_size=4,
    )
    .map("".join)
    .filter(bool)
)
prompts = st.integers(0, 40)


class TestTransferId:
    @given(externals, externals, prompts, st.integers(0, 2**63 - 1))
    def test_origins_never_collide(self, one: str, other: str, prompt: int, epoch: int) -> None:
        named = TransferId.derived(one, prompt), TransferId.routed(other, prompt), TransferId.mint(epoch, other, prompt)
        assert len(set(named)) == 3

    def test_it_is_a_value(self) -> None:
        transfer = TransferId.derived("x", 2)
        assert pickle.loads(pickle.dumps(transfer)) == transfer
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(transfer), type=TransferId) == transfer
        assert {transfer: 1}[TransferId.derived("x", 2)] == 1
        later = TransferId.derived("x", 10)
        assert sorted([later, transfer]) == [transfer, later]
        assert str(transfer) == "ext/x#2"

    def test_text_that_no_message_could_carry_is_refused(self) -> None:
        with pytest.raises(IdentityError, match="not valid Unicode"):
            TransferId.routed("\ud800")


hosts = st.one_of(
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
    st.ip_addresses(v=6).map("[{}]".format),
    st.sampled_from(["localhost", "p-0.prefill.svc.cluster.local", "Node7", "1a", "xn--bcher-kva.example"]),
)
ports = st.integers(1, 65535)
uuids = st.one_of(st.uuids().map(lambda u: u.hex), st.sampled_from(["u", "u_1", "a:5_b", "é"]))


class TestAddress:
    @pytest.mark.parametrize(
        ("text", "address"),
        [
            ("10.0.0.7:14579", Address("10.0.0.7", 14579)),
            ("[FD00:0::7]:1", Address("fd00::7", 1)),
            ("fd00::7:1", Address("fd00::7", 1)),
            ("Node-7.Example:65535", Address("node-7.example", 65535)),
        ],
    )
    def test_one_form_for_each_host(self, text: str, address: Address) -> None:
        assert parse_address(text) == address
        assert parse_address(str(address)) == address

    @pytest.mark.parametrize(
        "text",
        ["", "h: 5", f"{'a' * 254}:5"]
        + ": h h: h:+5 h:0 h:65536 127.1:5 0x7f000001:5 2130706433:5 010.0.0.1:5 1.2.3.4.5:5 [10.0.0.1]:5 [h]:5 [::1:5 ::1]:5".split()
        + "fe80::1%eth0:5 [fe80::1%0]:5 a..b:5 -a:5 a-:5 h.:5 é:5 h/x:5 u@h:5 tcp://h:5".split(),
    )
    def test_anything_else_is_refused(self, text: str) -> None:
        with pytest.raises(IdentityError):
            parse_address(text)

    @pytest.mark.parametrize(
        ("entry", "yes", "no"),
        [
            ("10.0.0.0/8", "10.255.0.1:5", "11.0.0.1:5"),
            ("10.0.0.0/8", "10.255.0.1:5", "[::ffff:10.0.0.1]:5"),
            ("fd00::/8", "[fd12::1]:5", "10.0.0.1:5"),
            ("10.0.0.7", "10.0.0.7:9", "10.0.0.8:9"),
            ("10.0.0.7:5", "10.0.0.7:5", "10.0.0.7:6"),
            ("fd00:0::7", "[fd00::7]:9", "[fd00::8]:9"),
            ("[fd00::7]", "fd00::7:9", "[fd00::8]:9"),
            ("[fd00::7]:5", "[fd00::7]:5", "[fd00::7]:6"),
            (" Node7 ", "node7:9", "node7.evil.example:9"),
            ("node7:5", "NODE7:5", "node7:6"),
        ],
    )
    def test_allow_list(self, entry: str, yes: str, no: str) -> None:
        assert allowed(parse_address(yes), ["other", entry])
        assert not allowed(parse_address(no), ["other", entry])

    def test_an_empty_allow_list_allows_none(self) -> None:
        assert not allowed(Address("localhost", 5), [])

    @pytest.mark.parametrize("entry", ["10.0.0.1/8", "x/8", "", "h:x", "[h]"])
    def test_a_bad_entry_is_told_even_behind_a_match(self, entry: str) -> None:
        with pytest.raises(IdentityError):
            allowed(Address("localhost", 5), ["localhost", entry])


def test_epochs_are_63_bits_and_do_not_repeat() -> None:
    epochs = {new_epoch() for _ in range(200)}
    assert len(epochs) == 200
    assert all(0 <= epoch < 2**63 for epoch in epochs)
    assert max(epochs) >= 2**61


ingredients: dict[str, st.SearchStrategy[Any]] = {
    "tokens": st.none() | st.lists(st.integers(-1, 3), max_size=3),
    "model": st.text("ab\0", max_size=2),
    "media": st.lists(st.tuples(st.text("ab", max_size=2), st.integers(0, 2), st.integers(0, 2)), max_size=2).map(
        tuple
    ),
    "lora": st.none() | st.text("a1", max_size=1) | st.integers(0, 1),
    "salt": st.none() | st.text("ab", max_size=2),
    "embeds": st.none() | st.binary(max_size=2),
}


class TestDigest:
    @given(st.fixed_dictionaries(ingredients), st.fixed_dictionaries(ingredients))
    def test_equal_only_if_all_ingredients_are(self, one: dict[str, Any], other: dict[str, Any]) -> None:
        assert (digest(**one) == digest(**other)) == (one == other)
        assert len(digest(**one)) == 16

    @given(st.fixed_dictionaries(ingredients), st.sampled_from(sorted(ingredients)), st.data())
    def test_each_ingredient_counts(self, one: dict[str, Any], name: str, data: st.DataObject) -> None:
        value = data.draw(ingredients[name].filter(lambda value: value != one[name]))
        assert digest(**one) != digest(**{**one, name: value})

    @given(st.lists(st.integers(0, 2**31 - 1), max_size=20))
    def test_token_ids_count_whatever_holds_them(self, tokens: list[int]) -> None:
        expected = digest(tokens=tokens, model="m")
        assert digest(tokens=tuple(tokens), model="m") == expected
        for dtype in ("<i4", ">i4", "<u4", "<i8"):
            assert digest(tokens=np.array(tokens, dtype=dtype), model="m") == expected
        assert digest(tokens=np.repeat(np.array(tokens, dtype="<i4"), 2)[::2], model="m") == expected

    @given(st.lists(st.sampled_from([-(2**63), -1, 0, 7, 2**31, 2**32 - 1, 2**32, 2**63 - 1]), max_size=9))
    def test_so_they_do_at_the_ends_of_what_machines_count_in(self, tokens: list[int]) -> None:
        assert digest(tokens=tokens, model="m") == digest(tokens=np.array(tokens, "<i8"), model="m")

    @pytest.mark.parametrize(
        "tokens",
        [
            [1.0],
            [1, 2.0],
            [True],
            ["1"],
            [1, "1"],
            [[1, 2]],
            [2**63],
            np.array([2**63], "<u8"),
            np.array([2**63], ">u8"),
            np.zeros((1, 1), "i8"),
        ],
    )
    def test_other_tokens_are_refused(self, tokens: Any) -> None:
        with pytest.raises(IdentityError, match="token ids must be"):
            digest(tokens=tokens, model="m")

    def test_it_is_the_same_in_every_process(self) -> None:
        """Engines of different releases compare it: a change of this value needs a new protocol version."""
        value = digest(tokens=[1, 2, 3], model="m", media=[("h", 1, 2)], lora="l", salt="s", embeds=b"e")
        assert value.hex() == "1410dae07f968d31dd5431bd94608507"


parts = st.recursive(
    st.one_of(
        st.text(max_size=4),
        st.text("/#:-_\0", max_size=3),
        st.integers(-(2**63), 2**64 - 1),
        st.binary(max_size=4),
        st.none(),
        st.builds(TransferId, st.text("a/#", max_size=3), st.integers(0, 3)),
    ),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)


class TestKey:
    @given(st.lists(parts, max_size=4).map(tuple), st.lists(parts, max_size=4).map(tuple))
    @example(("ab", "c"), ("a", "bc"))
    @example(("1",), (1,))
    @example((b"a",), ("a",))
    @example((("a", "b"),), ("a", "b"))
    @example((TransferId("a", 1),), (("a", 1),))
    @example((), ((),))
    @example((0,), (None,))
    def test_different_parts_never_share_a_key(self, one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
        assert (key(*one) == key(*other)) == (one == other)

    @pytest.mark.parametrize("part", [1.5, [1], {"a": 1}, 2**64, -(2**63) - 1, "\ud800", object()])
    def test_other_parts_are_refused(self, part: Any) -> None:
        with pytest.raises(IdentityError):
            key("t", part)


def test_an_id_without_its_producer_s_epoch() -> None:
    """What a consumer knows of it but the epoch; the producer's directory fills that in, and in nothing else."""
    own, anywhere = TransferId.mint(7, "own/x", 3), TransferId.mint(0, "own/x", 3)
    assert own.anywhere == anywhere == anywhere.anywhere and anywhere.of(7) == own and own.of(8) == own
    assert anywhere.unplaced and not own.unplaced
    for other in (TransferId.derived("own/x"), TransferId.routed(f"own/{0:016x}/x")):
        assert other.of(7) == other == other.anywhere and not other.unplaced
