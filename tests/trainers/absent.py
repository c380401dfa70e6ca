"""Packages that a trainer imports on the way to the code that is tested, and that are for GPUs, or for logging
elsewhere. Nothing of them is used; what is called all the same fails."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import without_gpu


class _Finder:
    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        absent = any(name == one or name.startswith(one + ".") for one in self._names)
        return ModuleSpec(name, self, is_package=True) if absent else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return without_gpu._Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def packages(*names: str) -> None:
    """They, and all that is in them."""
    sys.meta_path.insert(0, _Finder(names))  # type: ignore[arg-type]
