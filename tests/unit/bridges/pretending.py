"""A trainer's package that is not installed here."""

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import pytest


def pretend(monkeypatch: pytest.MonkeyPatch, packages: Mapping[str, Mapping[str, Any]]) -> None:
    """Modules by their dotted names, with these things in them; those around them are empty."""
    for dotted, things in packages.items():
        for depth in range(1, dotted.count(".") + 1):
            outer = ".".join(dotted.split(".")[:depth])
            if outer not in sys.modules:
                monkeypatch.setitem(sys.modules, outer, ModuleType(outer))
        made = ModuleType(dotted)
        vars(made).update(things)
        monkeypatch.setitem(sys.modules, dotted, made)
