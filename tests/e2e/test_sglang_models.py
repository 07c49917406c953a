"""Real SGLang servers without a GPU, of models with latents, sliding windows and recurrent states, beside full attention."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvxfer_bench.sglang.servers import ask_pair
from tests.conftest import require
from tests.e2e.models import write_mla, write_recurrent, write_unlike_heads
from tests.e2e.sglang_pair import CHECKED, complaints, expected, is_idle, prompt, ready, staged

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

TOKENS = 12
LENGTHS = (1, 16, 40, 70, 300, 700)
"""Less than a page, a page, less and more than a window of 64, and several chunks of 256."""


@dataclass(frozen=True)
class Kind:
    """A kind of model.

    Attributes:
        write: Writes it.
        more: What SGLang asks of its configuration besides.
        log: What each server's log says of its pools, if they are those of this kind.
        flags: Of all its servers.
    """

    write: Callable[[Path], None]
    more: dict[str, Any]
    log: str
    flags: tuple[str, ...] = ()


# SGLang's CPU device has DeepSeek's positions with scaling alone.
_YARN = {
    "rope_type": "yarn",
    "factor": 2.0,
    "original_max_position_embeddings": 1024,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
KINDS = {
    "latents": Kind(write_mla, {"rope_scaling": _YARN, "moe_layer_freq": 1}, ", KV size:"),
    # SGLang takes the positions as Llama's configuration has them; that of MiMo V2 Flash has them for each kind of layer.
    "windows": Kind(write_unlike_heads, {"model_type": "llama", "n_routed_experts": 1}, "hybrid_swa=True"),
    # SGLang has a prefix tree for recurrent states on GPUs, or with pages of one token.
    "states": Kind(write_recurrent, {}, "hybrid_ssm=True", ("--disable-radix-cache",)),
}


@pytest.mark.parametrize("name", KINDS)
def test_the_tokens_are_those_of_a_plain_server(name: str, tmp_path: Path) -> None:
    """One by one, at once, and again with a beginning that the prefill server has in its prefix tree."""
    require("sglang")
    kind, model = KINDS[name], tmp_path / name
    model.mkdir()
    kind.write(model)
    config = model / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **kind.more}))
    prompts = [prompt(700 + n, n) for n in LENGTHS]
    prompts += [prompts[-1] + prompt(800, 50), prompts[-1][:100]]
    with staged(model, tmp_path) as stage:
        plain, pair = stage.plain(*kind.flags), stage.pair(*CHECKED, *kind.flags)
        servers = (pair.prefill, pair.decode)
        ready(plain, *servers)
        assert all(kind.log in server.log.read_text() for server in (plain, *servers))
        wanted = [expected(plain, ids, TOKENS) for ids in prompts]
        assert len({token for tokens in wanted for token in tokens}) > len(prompts), "tokens that tell prompts apart"
        assert [ask_pair(stage.threads, pair, ids, TOKENS).tokens() for ids in prompts] == wanted
        asked = [ask_pair(stage.threads, pair, ids, TOKENS) for ids in prompts]
        assert [one.tokens() for one in asked] == wanted
        for server in servers:
            is_idle(server)
            assert not complaints(server)
