"""SGLang without what it asks for: its Python code in a folder of the environment, and stubs for what CPUs cannot have.

Its disaggregation code runs so, and with its own CPU device also its servers (tests/e2e/sglang_server.py). Only processes of
played engines and of such servers use this: a stub of torchvision would be taken for the real one by whatever else is imported.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path

FOLDER = Path(sys.prefix, "sglang")
"""Where `make` puts SGLang (see the Makefile)."""

STUBBED = frozenset({"IPython", "gguf", "sgl_kernel", "soundfile", "torchvision"})
"""What SGLang imports at its start and the tests never call."""


def lack() -> str | None:
    """Why SGLang cannot be imported by `install`, or None if it can."""
    if (FOLDER / "sglang").is_dir() or importlib.util.find_spec("sglang") is not None:
        return None
    return f"sglang is neither installed nor in {FOLDER}"


class _Attribute:
    """Whatever is taken from a stub: a name below it, a decorator, a base class."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> "_Attribute":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Attribute(f"{self._name}.{name}")

    def __mro_entries__(self, _bases: object) -> tuple[type, ...]:
        return (object,)

    def __call__(self, *_: object, **__: object) -> object:
        raise RuntimeError(f"{self._name} is a stub, and a test has called it")


class _Stub(types.ModuleType):
    def __getattr__(self, name: str) -> _Attribute:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Attribute(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in STUBBED:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install() -> None:
    """Make `import sglang` work in this process."""
    from transformers.utils import import_utils

    import_utils.is_torchvision_available()  # remembers that it is not here, before a stub says that it is
    if FOLDER.is_dir():
        sys.path.append(str(FOLDER))
    sys.meta_path.append(_Finder())
