"""No part of the core but ``kvxfer/memory`` knows a kind of device by name, so that any kind is as good as any other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1] / "kvxfer"
HOME = "memory"

DEVICES = "cuda|rocm|hip|xpu|hpu|npu|tpu|mps|mtia|neuron|rbln|xla|musa|gaudi"
_VALUE = re.compile(rf"\S*(\b|_)({DEVICES})(\b|_)\S*|cpu")
_NAME = re.compile(rf"(^|_)({DEVICES})(s?_|s?$)", re.I)

APART = {"backend/ucx.py": "UCX's own names of its transports, as in its settings and its log"}
"""Folders and files that are not looked at, and why."""

EXCEPTIONS = {
    "geometry/tensor.py": {
        "'cpu'": "the one definition of HOST: the name that host memory has in settings and on the wire",
        "'cuda'": "what torch calls the devices of two of DLPack's numbers",
        "'xpu'": "what torch calls the devices of one of DLPack's numbers",
        "'__cuda_array_interface__'": "the name of a protocol of other libraries",
        "on_cuda": "what that protocol says",
        "'cuda:'": "the only devices that this protocol is for",
    }
}
"""File, what it says, and why it must."""


def told(path: Path) -> set[str]:
    """Return the kinds of device that a file names, in strings that are one and in names; prose is not code."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if _VALUE.fullmatch(node.value):
                found.add(repr(node.value))
        else:
            names = [getattr(node, key, None) for key in ("id", "attr", "name", "arg")]
            found |= {name for name in names if isinstance(name, str) and _NAME.search(name)}
    return found


def test_no_kind_of_device_is_named_outside_one_folder() -> None:
    files = {path.relative_to(ROOT).as_posix(): path for path in sorted(ROOT.rglob("*.py"))}
    apart = {HOME, *APART}
    named = {
        file: told(path) - EXCEPTIONS.get(file, {}).keys()
        for file, path in files.items()
        if not {file, file.partition("/")[0]} & apart
    }
    assert not {file: found for file, found in named.items() if found}


def test_each_exception_is_needed() -> None:
    for file, reasons in EXCEPTIONS.items():
        assert reasons.keys() <= told(ROOT / file), file


def test_the_search_finds_what_it_should(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(
        '"""About cuda."""\nif d == "cuda" or d == "xpu:0": torch.cuda.x()\nCUDA_RUN = f"cuda:{n}"\ncpus = "cpu"\nt = "sm,cuda"\n'
    )
    assert told(file) == {"'cuda'", "'xpu:0'", "cuda", "CUDA_RUN", "'cuda:'", "'cpu'", "'sm,cuda'"}
