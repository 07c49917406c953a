"""Ids of one request, however two vLLM engines dress it up, must meet; those of two requests must not."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvxfer.identity import IdentityError, TransferId, parse_address
from kvxfer_vllm.said import ExternalId, external_id, routed_addresses
from tests.test_identity import externals, hosts, ports, prompts, uuids

suffixes = st.text("0123456789abcdef", min_size=8, max_size=8)
children = st.none() | st.integers(0, 12)
served = st.sampled_from(["cmpl", "chatcmpl", "generate-tokens"])


def internal(kind: str, external: str, prompt: int, child: int | None, suffix: str) -> str:
    """The id that vLLM's core sees of a request that came over HTTP."""
    item = f"{kind}-{external}-{prompt}" if kind == "cmpl" else f"{kind}-{external}"
    return ("" if child is None else f"{child}_") + item + (f"-{suffix}" if suffix else "")


def derived(external: ExternalId) -> TransferId:
    return TransferId.derived(external.base, external.prompt)


class TestExternalId:
    @given(served, externals, prompts, children, suffixes)
    def test_http_ids_are_read_back_exactly(
        self, kind: str, external: str, prompt: int, child: int | None, suffix: str
    ) -> None:
        expected = ExternalId(external, prompt if kind == "cmpl" else 0, child)
        assert external_id(internal(kind, external, prompt, child, suffix)) == expected

    @given(served, externals, prompts, children, children, suffixes, suffixes)
    def test_both_sides_derive_the_same_transfer(
        self, kind: str, external: str, prompt: int, here: int | None, there: int | None, one: str, other: str
    ) -> None:
        """Also where only one side samples more than once."""
        producer = external_id(internal(kind, external, prompt, here, one))
        consumer = external_id(internal(kind, external, prompt, there, other))
        assert derived(producer) == derived(consumer)
        assert TransferId.routed("r", producer.prompt) == TransferId.routed("r", consumer.prompt)

    @given(externals, suffixes, suffixes)
    def test_bare_ids_of_offline_use_agree(self, external: str, one: str, other: str) -> None:
        assert outcome(f"{external}-{one}") == outcome(f"{external}-{other}")

    @given(externals, prompts, prompts, suffixes)
    def test_prompts_of_a_batch_differ(self, external: str, one: int, other: int, suffix: str) -> None:
        ids = {derived(external_id(internal("cmpl", external, prompt, None, suffix))) for prompt in (one, other)}
        assert len(ids) == len({one, other})

    @given(served, externals, externals, suffixes, suffixes)
    def test_different_requests_differ(self, kind: str, one: str, other: str, s: str, t: str) -> None:
        same = external_id(internal(kind, one, 0, None, s)) == external_id(internal(kind, other, 0, None, t))
        assert same == (one == other)

    @given(externals, prompts, suffixes)
    def test_rejected_completion_is_found_without_its_suffix(self, external: str, prompt: int, suffix: str) -> None:
        rejected = external_id(internal("cmpl", external, prompt, None, ""))
        assert rejected == external_id(internal("cmpl", external, prompt, None, suffix))

    @pytest.mark.parametrize(
        ("given_id", "expected"),
        [
            ("0-86a9ce7b", ExternalId("0", 0, None)),
            ("1_0-87846b83", ExternalId("0", 0, 1)),
            ("chatcmpl-0123456789abcdef", ExternalId("0123456789abcdef", 0, None)),
            ("chatcmpl-x_1-86a9ce7b", ExternalId("x_1", 0, None)),
            ("generate-tokens-x-86A9CE7B", ExternalId("x-86A9CE7B", 0, None)),
            ("cmpl-a b/ü\n-3-00000000", ExternalId("a b/ü\n", 3, None)),
        ],
    )
    def test_examples(self, given_id: str, expected: ExternalId) -> None:
        assert external_id(given_id) == expected

    def test_what_is_not_promised(self) -> None:
        """A look-alike suffix or prefix is taken for the engine's where the engine added none."""
        assert external_id("chatcmpl-job-deadbeef").base == "job"
        assert external_id("chatcmpl-job-deadbeef-01234567").base == "job-deadbeef"
        assert external_id("7_x-86a9ce7b") == ExternalId("x", 0, 7)

    @pytest.mark.parametrize("empty", ["", "-86a9ce7b", "cmpl--0-86a9ce7b", "chatcmpl-", "3_"])
    def test_nothing_left_is_refused(self, empty: str) -> None:
        with pytest.raises(IdentityError, match="no external part"):
            external_id(empty)


def outcome(given_id: str) -> ExternalId | None:
    try:
        return external_id(given_id)
    except IdentityError:
        return None


class TestLegacy:
    @given(hosts, ports, hosts, ports, uuids, suffixes, suffixes)
    def test_both_sides_read_the_same(
        self, p: str, p_port: int, d: str, d_port: int, uuid: str, one: str, other: str
    ) -> None:
        base = f"___prefill_addr_{p}:{p_port}___decode_addr_{d}:{d_port}_{uuid}"
        producer = external_id(internal("cmpl", base, 0, None, one))
        consumer = external_id(internal("cmpl", base, 0, None, other))
        assert derived(producer) == derived(consumer)
        found = routed_addresses(producer)
        assert found is not None and found == routed_addresses(consumer)
        assert found.prefill == parse_address(f"{p}:{p_port}")
        assert (found.decode, found.uuid) == (parse_address(f"{d}:{d_port}"), uuid)

    @given(externals.filter(lambda text: "_addr_" not in text))
    def test_any_other_id_is_none(self, base: str) -> None:
        assert routed_addresses(ExternalId(base, 0, None)) is None

    @pytest.mark.parametrize(
        "base",
        [
            "___prefill_addr_evil:22___prefill_addr_h1:5___decode_addr_h2:5_u",
            "___prefill_addr_h1:5___decode_addr_evil:22___decode_addr_h2:5_u",
            "___decode_addr_h2:5___prefill_addr_h1:5_u",
            "x___prefill_addr_h1:5___decode_addr_h2:5_u",
            "___prefill_addr___decode_addr_h2:5_u",
            "___prefill_addr_h1:5___decode_addr___decode_addr_h2:5_u",
            "___prefill_addr_h1:5",
            "___decode_addr_h2:5_u",
            "___prefill_addr_h1:5___decode_addr_h2:5",
            "___prefill_addr_h1:5___decode_addr_h2:5_",
            "___prefill_addr_h1___decode_addr_h2:5_u",
            "___prefill_addr_h1:0___decode_addr_h2:5_u",
            "___prefill_addr_h1:65536___decode_addr_h2:5_u",
            "___prefill_addr_h1:5:6___decode_addr_h2:5_u",
            "___prefill_addr_h_1:5___decode_addr_h2:5_u",
            "___prefill_addr_h1:5@evil:6___decode_addr_h2:5_u",
            "___prefill_addr_:5___decode_addr_h2:5_u",
            "___prefill_addr_h1:5\n___decode_addr_h2:5_u",
            "___prefill_addr_h1:٣___decode_addr_h2:5_u",
        ],
    )
    def test_hostile_ids_fail_closed(self, base: str) -> None:
        with pytest.raises(IdentityError):
            routed_addresses(ExternalId(base, 0, None))

    @given(
        st.lists(st.sampled_from(["___prefill_addr_", "___decode_addr_", "h1:5", "[::1]:7", "_", "u", "__", "%"])).map(
            "".join
        )
    )
    @example("___prefill_addr_h1:5___decode_addr_h2:5_u")
    def test_what_is_accepted_reads_in_one_way_only(self, base: str) -> None:
        try:
            found = routed_addresses(ExternalId(base, 0, None))
        except IdentityError:
            return
        if found is None:
            assert "_addr_" not in base
        else:
            assert base == f"___prefill_addr_{found.prefill}___decode_addr_{found.decode}_{found.uuid}"


def test_a_long_id_is_cut_in_the_error_which_goes_to_the_log() -> None:
    with pytest.raises(IdentityError) as error:
        routed_addresses(ExternalId("___prefill_addr_" + "x" * (3 << 20), 0, None))
    assert len(str(error.value)) < 500
