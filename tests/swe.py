"""The made-up instances of examples/swe, as tests want them."""

import importlib.metadata
import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
UNITTEST = "made-up/clock={python} -m unittest {files}"
_PYTEST = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")


def example() -> ModuleType:
    """The program that makes them."""
    spec = importlib.util.spec_from_file_location("made_up", ROOT / "examples" / "swe" / "made_up.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pytest_folder(folder: Path) -> Path:
    """As `pip install --target` makes it, without asking a registry."""
    for name in _PYTEST:
        for file in importlib.metadata.files(name) or ():
            if ".." not in file.parts and "__pycache__" not in file.parts:
                target = folder / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file.locate(), target)
    return folder
