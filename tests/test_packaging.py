"""What is promised about installing and importing: few dependencies, siblings found, borders kept."""

import ast
import json
import subprocess
import sys
import tarfile
import tomllib
import venv
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import kvxfer

ROOT = Path(__file__).parent.parent
SIBLINGS = sorted(
    path
    for folder in ("backends/*", "benchmarks", "connectors/*", "testing")
    for path in ROOT.glob(f"{folder}/pyproject.toml")
)
HEAVY = {"torch", "vllm", "nixl", "nixl_cu12", "ucxx", "nccl", "cuda", "cupy", "transformers", "sglang"}

# Who may import whom inside the core: only downwards, or within the same part.
LEVELS = [
    {"text", "clock", "flag", "shares", "transitions"},
    {"failures", "logs"},
    {"errors", "threads"},
    {"arguments", "keyfile"},
    {"identity", "fence", "block_table"},
    {"facts", "ledger", "settings", "values"},
    {"geometry", "keyring", "ticket"},
    {"config"},
    {"memory", "transport", "schedule", "security"},
    {"backend"},
    {"protocol"},
    {"data"},
    {"control"},
    {"engine"},
    {"kvxfer"},  # the package itself, which offers what users need under one name
    {"cli"},
    {"testing"},
    {"__main__"},
]


def core_modules() -> dict[str, Path]:
    """Dotted name of every module of the core, and its file."""
    found = [(at, path) for at in (ROOT, ROOT / "testing") for path in (at / "kvxfer").rglob("*.py")]
    files = {path.relative_to(at): path for at, path in found}
    return {".".join(f.with_suffix("").parts).removesuffix(".__init__"): path for f, path in files.items()}


def imports(path: Path) -> set[str]:
    """Dotted names that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def loads(modules: list[str]) -> set[str]:
    """Return the heavy packages that importing these modules loads."""
    program = (
        "import sys\n"
        "before = set(sys.modules)\n"  # a .pth file of another distribution may load anything
        f"for name in {modules!r}: __import__(name)\n"
        "print(*(set(sys.modules) - before), sep=chr(10))\n"
    )
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert loaded.returncode == 0, loaded.stderr
    return {name.partition(".")[0] for name in loaded.stdout.split()} & HEAVY


def test_importing_the_core_loads_no_engine_and_no_transport_library() -> None:
    on_demand = (
        "kvxfer.cli",
        "kvxfer.testing",
        "kvxfer.memory.cuda",
        "kvxfer.memory.triton_kernels",
        "kvxfer.memory.indexed",
        "kvxfer.memory.torch_space",
    )
    assert not loads([name for name in core_modules() if not name.startswith(on_demand)])


def test_the_program_loads_no_engine_before_it_is_asked_to() -> None:
    """It has a command of each connector's, and ``--help`` must not take the seconds that an engine's import takes."""
    assert not loads(["kvxfer.cli.main", *(point.module for point in entry_points(group="kvxfer.commands"))])


@pytest.mark.parametrize("name", sorted(core_modules()))
def test_the_core_imports_no_engine_back_end_or_connector_even_lazily(name: str) -> None:
    packages = {imported.partition(".")[0] for imported in imports(core_modules()[name])}
    allowed = {"torch"} if name.startswith(("kvxfer.memory", "kvxfer.testing", "kvxfer.cli.host")) else set()
    assert packages & HEAVY <= allowed
    assert not any(package.startswith("kvxfer_") for package in packages)


@pytest.mark.parametrize("name", sorted(core_modules()))
def test_knowledge_points_one_way(name: str) -> None:
    level = {part: i for i, parts in enumerate(LEVELS) for part in parts}
    part = name.removeprefix("kvxfer.").split(".")[0]
    for imported in imports(core_modules()[name]):
        if imported.startswith("kvxfer."):
            other = imported.split(".")[1]
            if other != part and other in level:
                assert level[other] < level[part], f"{name} imports {imported}, above or beside it"


def test_every_part_of_the_core_has_its_level() -> None:
    parts = {name.split(".")[1] for name in core_modules() if "." in name}
    assert parts <= set().union(*LEVELS)


@pytest.mark.parametrize("path", SIBLINGS, ids=lambda path: path.parent.name)
def test_siblings_are_released_in_lock_step_and_name_the_core_plainly(path: Path) -> None:
    project = tomllib.loads(path.read_text())["project"]
    assert project["version"] == kvxfer.__version__
    assert "kvxfer" in project["dependencies"]


def test_every_sibling_is_known_to_the_core_under_its_folder() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    siblings = tools["hatch"]["metadata"]["hooks"]["custom"]["siblings"]
    folders = {f"kvxfer-{name}": folder for name, folder in siblings.items()}
    for path in SIBLINGS:
        name = tomllib.loads(path.read_text())["project"]["name"]
        assert folders.get(name) == path.parent.relative_to(ROOT).as_posix(), name


def test_a_checkout_takes_siblings_from_their_folders_and_a_release_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = metadata(ROOT)
    assert {line.partition(">")[0] for line in checkout["dependencies"]} == {"msgspec", "numpy"}
    assert checkout["optional-dependencies"]["zmq"] == [f"kvxfer-zmq @ {(ROOT / 'backends/zmq').as_uri()}"]

    monkeypatch.setenv("KVXFER_RELEASE", "1")
    hatchling("build", "-t", "sdist", "-d", str(tmp_path), folder=ROOT)
    monkeypatch.delenv("KVXFER_RELEASE")  # what is built from the sdist needs no such care
    with tarfile.open(tmp_path / f"kvxfer-{kvxfer.__version__}.tar.gz") as sdist:
        assert not [name for name in sdist.getnames() if "/kvxfer/testing" in name], "it is for kvxfer-testing"
        sdist.extractall(tmp_path)
    released = metadata(tmp_path / f"kvxfer-{kvxfer.__version__}")
    assert released["optional-dependencies"]["zmq"] == [f"kvxfer-zmq=={kvxfer.__version__}"]
    assert released["optional-dependencies"]["vllm"] == [f"kvxfer-vllm=={kvxfer.__version__}"]
    assert not any("file:" in line for line in json.dumps(released).split())
    assert released["version"] == checkout["version"] == kvxfer.__version__


def metadata(folder: Path) -> dict:
    return json.loads(hatchling("metadata", folder=folder))


def hatchling(*arguments: str, folder: Path) -> str:
    command = [sys.executable, "-m", "hatchling", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=300).stdout


@pytest.mark.slow
def test_pip_install_brings_a_working_program_and_nothing_heavy(tmp_path: Path) -> None:
    venv.create(tmp_path)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(tmp_path / "bin" / "python")]
    program = [str(tmp_path / "bin" / "kvxfer"), "doctor", "--json"]
    subprocess.run([*pip, "install", "-q", "--no-compile", str(ROOT)], check=True, timeout=240)
    bare = subprocess.run(program, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert bare.returncode == 1 and "pip install '.[cli]'" in bare.stderr

    subprocess.run(
        [*pip, "install", "-q", "--no-compile", "kvxfer[cli,tcp]"], check=True, timeout=240
    )  # the one above, and more
    listed = subprocess.run([*pip, "list", "--format=json"], capture_output=True, check=True, timeout=300)
    names = {entry["name"].lower() for entry in json.loads(listed.stdout)}
    assert {"kvxfer", "kvxfer-tcp"} <= names
    assert not {name for name in names if name.startswith(("torch", "vllm", "nixl", "nvidia", "ucx", "cuda"))}

    report = subprocess.run(program, capture_output=True, check=True, timeout=300, cwd=tmp_path)
    assert json.loads(report.stdout)["backends"]["tcp"]["usable"]
