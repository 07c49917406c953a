"""The CUDA kernels, as far as a machine without one can test them."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent

if any(importlib.util.find_spec(name) is None for name in ("torch", "triton")):
    pytest.skip("torch and Triton are not installed", allow_module_level=True)


@pytest.mark.slow
def test_kernels_under_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE / "interpreted.py")],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def compiled(name: str, wide: set[str], **constants: Any) -> str:
    """PTX of a kernel for a Hopper GPU, which needs none."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kvxfer.memory import triton_kernels

    kernel = getattr(triton_kernels, name)
    arguments = kernel.arg_names
    pointers = {"cells", "segments", "cell_keys", "factors", "out"}
    signature = {
        a: "constexpr" if a in constants else "*i64" if a in pointers else "i64" if a in wide else "i32"
        for a in arguments
    }
    aligned = {(i,): [["tt.divisibility", 16]] for i, a in enumerate(arguments) if a in pointers}
    source = ASTSource(kernel, signature, {(arguments.index(a),): v for a, v in constants.items()}, aligned)
    return str(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"])


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize(("rows", "words"), [(32, 32), (2, 512), (1, 1024)])
def test_aligned_rows_move_sixteen_bytes_at_a_time(rows: int, words: int, pack: bool) -> None:
    wide = {"memory", "stream", "stride1", "stride2"}
    ptx = compiled("move_rows", wide, UNIT=16, ROWS=rows, WORDS=words, PACK=pack)
    assert len(re.findall(r"ld\.global\S*\.v2\.b64", ptx)) == rows * words // 2 // 128
    assert len(re.findall(r"st\.global\S*\.v2\.b64", ptx)) == rows * words // 2 // 128
    assert not re.search(r"st\.global\S*(?<!v2)\.b64", ptx)


def test_aligned_units_are_digested_sixteen_bytes_at_a_time() -> None:
    wide = {"memory", "stride1", "stride2", "key1", "key2", "salt"}
    ptx = compiled("digest_rows", wide, UNIT=16, ROWS=32, WORDS=32)
    assert re.search(r"ld\.global\S*\.v2\.b64", ptx)
