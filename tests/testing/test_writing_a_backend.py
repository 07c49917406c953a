"""The back end of docs/writing-a-backend.md is complete and keeps the contract: its code is run from the page."""

import atexit
import importlib
import re
import shutil
import sys
import tempfile
from pathlib import Path

from kvxfer.transport import registry

PAGE = Path(__file__).parents[2] / "docs" / "writing-a-backend.md"
BLOCKS = re.findall(r"^```(python[^\n]*)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)

# A module, and in a folder on the path, because the suite's other processes import it too.
_folder = tempfile.mkdtemp(prefix="kvxfer-docs-")
atexit.register(shutil.rmtree, _folder, ignore_errors=True)
Path(_folder, "kvxfer_docs_socket.py").write_text("".join(code for tag, code in BLOCKS if tag == "python"))
sys.path.append(_folder)
SocketTransport = importlib.import_module("kvxfer_docs_socket").SocketTransport
exec("".join(code for tag, code in BLOCKS if tag == "python test"))  # defines TestSocket as the page shows it


def test_the_example_can_be_named_in_a_configuration() -> None:
    assert registry.load("kvxfer_docs_socket:SocketTransport") is SocketTransport
