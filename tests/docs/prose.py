"""The prose of the project: what people read on pages, in docstrings, comments, errors, logs, metrics and help texts."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = ("kvxfer", "backends", "connectors", "benchmarks", "examples", "testing")
RECORDS = ROOT / "benchmarks" / "results"
"""What was measured on a day: left as it was written."""

Text = tuple[str, str]
"""A place, and a paragraph, list item, table cell or string there, without markup."""

_FENCE = re.compile(r"^( *)```.*?^\1```", re.M | re.S)
_INDENTED = re.compile(r"(?<=\n\n)(?: {4,}(?![*-] )\S.*\n)+")
_ITEM = re.compile(r"^ *(?:[*-]|\d+\.) ")
_HEADER = re.compile(r"^(Args|Attributes|Raises|Returns|Yields|Note|Example|Examples):$")


def plain(text: str) -> str:
    """Return a text without markup, its code replaced by one word."""
    text = re.sub(r"``.+?``|`[^`]+`", "CODE", text, flags=re.S)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return " ".join(text.replace("**", "").split())


def pages() -> list[Path]:
    """Return every Markdown page that is not a record of measurements."""
    found = [*ROOT.glob("*.md"), *ROOT.glob("news/*.md"), *(ROOT / "docs").rglob("*.md")]
    found += [page for folder in CODE for page in (ROOT / folder).rglob("*.md") if RECORDS not in page.parents]
    return sorted(found)


def _paragraphs(text: str, place: str, first: int = 1) -> Iterator[Text]:
    """Divide lines of Markdown or of a docstring into paragraphs, list items, arguments and cells."""
    held: list[str] = []
    begun = first

    def flush() -> Iterator[Text]:
        if held:
            yield f"{place}:{begun}", plain(" ".join(held))
        held.clear()

    indent = 0
    for number, line in enumerate(text.splitlines(), first):
        stripped = line.strip()
        if stripped.startswith("=="):
            yield from flush()
            continue
        if stripped.startswith("|"):
            yield from flush()
            for cell in re.split(r"(?<!\\)\|", stripped.strip("|")):
                if re.search(r"[a-z]", cell):
                    yield f"{place}:{number} (cell)", plain(cell)
            continue
        new = not stripped or stripped.startswith(("#", "<!--", "!!!")) or _ITEM.match(line) or _HEADER.match(stripped)
        depth = len(line) - len(line.lstrip())
        if new or (held and depth < indent) or re.match(r"\w+(?: \(.*?\))?: ", stripped):
            yield from flush()
        if not stripped or stripped.startswith("<!--") or _HEADER.match(stripped):
            continue
        if not held:
            begun, indent = number, depth
        held.append(re.sub(r"^(#+|[*-]|\d+\.) ", "", stripped))
        if stripped.startswith("#"):
            yield from flush()
    yield from flush()


def _blank(match: re.Match[str]) -> str:
    return "\n" * match[0].count("\n")


def of_page(page: Path) -> list[Text]:
    """Return the prose of a page."""
    text = _INDENTED.sub(_blank, _FENCE.sub(_blank, page.read_text()))
    return list(_paragraphs(text, str(page.relative_to(ROOT))))


def _strings(tree: ast.AST) -> Iterator[tuple[int, str, bool]]:
    """Yield line, text and whether it is a docstring, of each string with a space; what is put in at run time is `…`."""
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    inside: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inside |= {id(part) for part in ast.walk(node)}
            text = "".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values)
            yield node.lineno, text, False
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.lineno, node.value, id(node) in docs
    return


def template(node: ast.AST) -> Iterator[str]:
    """Yield a string of the code as pages write it: what is put in at run time is `…`."""
    match node:
        case ast.JoinedStr():
            yield "".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values)
        case ast.Constant(value=str() as text):
            yield re.sub(r"%[-.\w]*[dgfrs]|\{!?[rs]?\}", "…", text)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            yield from (a + b for a in template(left) for b in template(right))


def of_module(file: Path) -> list[Text]:
    """Return the docstrings, comments and other sentences of a module."""
    place, source = str(file.relative_to(ROOT)), file.read_text()
    found: list[Text] = []
    for line, text, documents in _strings(ast.parse(source)):
        if documents:
            found += _paragraphs(re.sub(r"::\n\n.*?(?=\n\S|\Z)", ".\n\n", text, flags=re.S), place, line)
        elif text.count(" ") >= 2 and re.search(r"[a-z] [a-z]", text) and "\nimport " not in text:
            found += [(f"{place}:{line}", plain(part)) for part in text.split("\n\n") if part.strip()]
    comments: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            text = token.string.lstrip("# ")
            alone = token.line.strip().startswith("#")
            if comments and alone and comments[-1][0] == token.start[0] - 1:
                comments[-1] = (token.start[0], f"{comments[-1][1]} {text}")
            else:
                comments.append((token.start[0], text))
    return found + [(f"{place}:{line}", plain(text)) for line, text in comments]


def of_data(file: Path) -> list[Text]:
    """Return the texts of alert rules and dashboards."""
    place = str(file.relative_to(ROOT))
    return [(place, plain(text)) for text in re.findall(r'"([^"\n]+ [^"\n]+ [^"\n]+)"', file.read_text())]


@cache
def prose() -> tuple[Text, ...]:
    """Return all of it."""
    code = sorted(file for folder in CODE for file in (ROOT / folder).rglob("*.py"))
    data = [*ROOT.glob("docs/*.yml"), *ROOT.glob("docs/*.json")]
    found = (*map(of_page, pages()), *map(of_module, code), *map(of_data, data))
    return tuple(text for texts in found for text in texts if " " in text[1])


def sentences(text: str) -> list[str]:
    """Divide a text after full stops, question marks and exclamation marks."""
    return re.split(r"(?<=[.!?])[)*\"']*\s+", text)
