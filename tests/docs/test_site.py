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
MEASURE = """<script>addEventListener("load", () => {
  const room = document.documentElement.clientWidth;
  const wide = [...document.querySelectorAll("article table")].filter(t => t.getBoundingClientRect().right > room);
  const names = wide.map(t => t.rows[0].innerText.replace(/\\s+/g, " "));
  document.body.setAttribute("data-wide", JSON.stringify(names));
})</script></body>"""


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
        def do_GET(self) -> None:
            path = Path(self.translate_path(self.path))
            page = path / "index.html" if path.is_dir() else path
            if page.suffix != ".html" or not page.is_file():
                return super().do_GET()
            body = page.read_text().replace("</body>", MEASURE).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

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
    quiet = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
    ]
    found = {}
    for page in pages(site):
        if "<table" not in page.read_text() or "reference" in page.parts:
            continue
        where = f"{served}/{page.relative_to(site).parent}/"
        command = [browser, *quiet, f"--user-data-dir={tmp_path}", f"--window-size={WIDTH},2000", "--dump-dom", where]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
        [wide] = re.findall(r'data-wide="(.*?)"', shown)
        if names := json.loads(html.unescape(wide)):
            found[page.parent.name] = names
    assert not found
