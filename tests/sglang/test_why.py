"""`kvxfer why ROOM` at SGLang's servers."""

import json
from collections.abc import Callable
from typing import Any

from typer.testing import CliRunner

from kvxfer.cli.main import build
from kvxfer_vllm.demo.servers import free_port
from tests.sglang.conftest import FAILED
from tests.sglang.test_transfers import begun, moved, sent


def test_a_room_is_one_story_of_both_servers(start: Callable[..., Any], room: int) -> None:
    port = free_port()

    def why(*words: str) -> tuple[int, list[dict[str, Any]]]:
        ran = CliRunner().invoke(build(), ["why", *words, "--decode", f"127.0.0.1:{port}", "--json"])
        return ran.exit_code, json.loads(ran.output)["requests"]

    with start(settings={"decode": {"port": port}}) as (prefill, decode):
        moved(prefill, decode, room, 1, [[3, 9, 4]], [7, 1, 30])
        code, (found,) = why(str(room))
        assert code == 0 and "it was delivered" in found["verdict"]["says"]
        assert found["decode"]["key"] == found["prefill"]["key"]
        assert found["prefill"]["request"] == f"room {room}" and found["decode"]["came"] > 0
        begun(prefill, decode, room, [7, 1], 3)  # three pages here, two there
        sent(prefill, room, 1, [[3, 9, 4]])
        decode.until(room, FAILED)
        code, (failed,) = why()
        assert (
            code == 1 and failed["decode"]["outcome"] == "digest_differs" and str(room) in failed["decode"]["request"]
        )
