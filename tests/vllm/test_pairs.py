"""What ``kvxfer bench engines`` compares, and what a router adds that sends to both servers at once."""

from __future__ import annotations

import pytest

from kvxfer.errors import ConfigError
from kvxfer_bench.vllm.pairs import asked, parsed, pushed


def test_a_back_end_may_have_settings() -> None:
    assert parsed("nixl") == ("nixl", {})
    assert parsed('nixl:{"blocks_outermost": false, "trace": "/a:b"}') == (
        "nixl",
        {"blocks_outermost": False, "trace": "/a:b"},
    )


@pytest.mark.parametrize("text", ["nixl:", "nixl:{", "nixl:[]", "nixl:staging_bytes=0"])
def test_what_is_no_setting_is_refused_before_a_server_starts(text: str) -> None:
    with pytest.raises(ConfigError, match="settings must be a JSON object"):
        parsed(text)


def test_both_servers_know_the_request_by_one_name() -> None:
    """kvxfer's by the transfer, vLLM's push connector by the request's id."""
    there, here = asked(7)("one")
    assert there["transfer_id"] == here["transfer_id"] == "one" and here["remote_port"] == 7
    there, here = pushed("p", 8)("one")
    assert there == {"do_remote_decode": True}
    assert (here["remote_request_id"], here["remote_engine_id"], here["remote_port"]) == ("one", "p", 8)
