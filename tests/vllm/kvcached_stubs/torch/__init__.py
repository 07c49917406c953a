"""What kvcached's setup.py asks torch for, so that its Python code can be installed where there is no CUDA to compile for."""

from types import SimpleNamespace

__version__ = "2.13.0"
version = SimpleNamespace(cuda="13.0", hip=None)
_C = SimpleNamespace(_GLIBCXX_USE_CXX11_ABI=True)
