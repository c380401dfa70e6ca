"""To be imported before trainers whose modules name, at their top, packages that are for GPUs alone. Nothing of these
packages is used on the CPU: what is called all the same fails."""

import importlib.util
import sys
import typing
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import typing_extensions

_PACKAGES = ("deepspeed", "flash_attn", "vllm")
_OPTIONAL = "flash_attn.ops"  # trainers do without it, where it can't be imported


def _absent(name: str, *_: Any, **__: Any) -> Any:
    raise ImportError(f"{name} is not there without a GPU")


class _Absent(ModuleType):
    __version__ = "0"
    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return partial(_absent, f"{self.__name__}.{name}")


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        if name.partition(".")[0] not in self.absent or name.startswith(_OPTIONAL):
            return None
        return ModuleSpec(name, self, is_package=True)

    absent = tuple(name for name in _PACKAGES if importlib.util.find_spec(name) is None)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


class _Cpu(str):
    """Where tensors are sent to; it also stands in names of devices, as a number."""

    def __format__(self, _: str) -> str:
        return "0"


import transformers.utils  # noqa: E402  # it looks for these packages, and does better without them

transformers.utils.is_flash_attn_2_available()
sys.meta_path.append(_Finder())
torch.cuda.current_device = lambda: _Cpu("cpu")  # type: ignore[assignment, return-value]
torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]  # SkyRL is for Pythons where they are one
