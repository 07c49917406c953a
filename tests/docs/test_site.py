"""The site as it is built: no markup that shows as such, nothing fetched from elsewhere, and in a browser no table wider than its page."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow
WIDTH = 1280
RAW = {
    "a row of a table": re.compile(r"^\s*\|.*\|\s*$", re.M),
    "a tab": re.compile(r'^\s*=== "', re.M),
    "an admonition": re.compile(r"^\s*!!! \w", re.M),
    "bold": re.compile(r"\*\*[A-Za-z]"),
    "a link": re.compile(r"\]\(\S+\)"),
    "a diagram": re.compile(r"^\s*(stateDiagram|sequenceDiagram|flowchart|graph (TD|LR))", re.M),
}
ALL = """<!doctype html><body>{frames}<script>addEventListener("load", () => {{
  const found = {{}};
  for (const frame of document.querySelectorAll("iframe")) {{
    const page = frame.contentDocument, room = page.documentElement.clientWidth;
    const wide = [...page.querySelectorAll("article table")].filter(t => t.getBoundingClientRect().right > room);
    found[frame.getAttribute("src")] = wide.map(t => t.rows[0].innerText.replace(/\\s+/g, " "));
  }}
  document.body.setAttribute("data-wide", JSON.stringify(found));
}})</script></body>"""
"""All pages next to each other, each as wide as a window, so that one start of a browser is enough."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "-q", "--strict", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return folder


def pages(site: Path) -> list[Path]:
    return [page for page in sorted(site.rglob("*.html")) if page.name != "404.html"]


def test_no_markup_shows(site: Path) -> None:
    """Text outside of code."""
    found = []
    for page in pages(site):
        [article] = re.findall(r"<article.*?</article>", page.read_text(), re.S)
        text = re.sub(r"<(pre|code)\b.*?</\1>", "", article, flags=re.S)
        text = html.unescape(re.sub(r"<[^>]+>", "", text))
        found += [(page.parent.name, what, match[0][:80]) for what, raw in RAW.items() if (match := raw.search(text))]
    assert not found


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    """By a page or a style sheet. Scripts of the theme name hosts that they would fetch diagrams and the like from, which no page has."""
    fetched = re.compile(
        r"""<(?:script|img|iframe)\b[^>]*\bsrc="(https?:)?//|<link\b[^>]*rel="(?:stylesheet|preload|icon)"[^>]*href="(https?:)?//"""
    )
    assert not [page for page in pages(site) if fetched.search(page.read_text())]
    assert not [sheet for sheet in site.rglob("*.css") if re.search(r"url\(['\"]?(https?:)?//", sheet.read_text())]
    assert not [page for page in pages(site) if 'class="mermaid"' in page.read_text()]


@pytest.fixture
def served(site: Path) -> Iterator[str]:
    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_no_table_is_wider_than_its_page(site: Path, served: str, tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("there is no Chromium")
    shown = [f"/{page.relative_to(site).parent}/" for page in pages(site) if "<table" in page.read_text()]
    shown = [page for page in shown if not page.startswith("/reference/")]
    frames = "".join(f'<iframe src="{page}" width="{WIDTH}" height="2000"></iframe>' for page in shown)
    (site / "all.html").write_text(ALL.format(frames=frames))
    quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    quiet += ["--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1", f"--user-data-dir={tmp_path}"]
    command = [browser, *quiet, f"--window-size={WIDTH},2000", "--dump-dom", f"{served}/all.html"]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=300).stdout
    (site / "all.html").unlink()
    [wide] = re.findall(r'<body data-wide="(.*?)"', dom)
    found = json.loads(html.unescape(wide))
    assert list(found) == shown and not {page: tables for page, tables in found.items() if tables}
