"""An extension of no sources, which nothing is compiled for."""

from typing import Any

from setuptools import Extension
from setuptools.command.build_ext import build_ext


class BuildExtension(build_ext):
    def run(self) -> None:
        pass


def CUDAExtension(name: str, *_: Any, **__: Any) -> Extension:  # noqa: N802
    return Extension(name, [])


CppExtension = CUDAExtension


def include_paths(**_: Any) -> list[str]:
    return []


library_paths = include_paths
