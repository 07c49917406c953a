"""`python -m tests.areas`: the lines of the tree by area, all of them and without docstrings, comments and blank lines."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
AREAS = {
    **{
        f"kvxfer/{room}": [f"kvxfer/{room}"]
        for room in ("geometry", "schedule", "engine", "protocol", "control", "data")
    },
    **{f"kvxfer/{room}": [f"kvxfer/{room}"] for room in ("memory", "transport", "backend", "cli")},
    "kvxfer, files": ["kvxfer/*.py"],
    "backends": ["backends/*"],
    "connectors": ["connectors/*"],
    "testing": ["testing"],
    "benchmarks": ["benchmarks"],
    "examples": ["examples"],
    "tests": ["tests"],
}
INSTRUMENTS = ("kvxfer/cli", "testing", "benchmarks", "examples", "tests")
"""What moves no KV. The vLLM connector's demo is counted with the connector."""
SKIPPED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}


def code_lines(text: str) -> int:
    """Return the lines of a module on which there is code."""
    said: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        for inner in ast.iter_child_nodes(node):  # docstrings, and strings that document what stands above them
            if (
                isinstance(inner, ast.Expr)
                and isinstance(inner.value, ast.Constant)
                and isinstance(inner.value.value, str)
            ):
                said.update(range(inner.lineno, (inner.end_lineno or inner.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SKIPPED:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - said)


def counted() -> Iterator[tuple[str, int, int, int]]:
    """Yield each area with its files, lines, and lines of code."""
    for area, patterns in AREAS.items():
        found = [path for pattern in patterns for path in ROOT.glob(pattern)]
        files = {file for path in found for file in ([path] if path.suffix == ".py" else path.rglob("*.py"))}
        texts = [file.read_text() for file in files if not file.is_symlink()]
        yield area, len(texts), sum(len(text.splitlines()) for text in texts), sum(map(code_lines, texts))


def main() -> None:
    """Print a row for each area, and the sums."""
    rows = list(counted())
    sums = {"what moves KV": [row for row in rows if row[0] not in INSTRUMENTS], "all but tests": rows[:-1]}
    rows += [(name, *map(sum, zip(*(row[1:] for row in some), strict=True))) for name, some in sums.items()]  # type: ignore[misc]
    print(f"{'area':20} {'files':>6} {'lines':>7} {'code':>7}")
    for area, files, lines, code in rows:
        print(f"{area:20} {files:6} {lines:7,} {code:7,}")


if __name__ == "__main__":
    main()
