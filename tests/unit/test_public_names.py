"""What `import polar` gives: the names in `__all__`, each imported when it is first used."""

import ast
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import polar
from polar import distribution

NAMES = (
    "Client", "AsyncClient", "ClientError", "TasksRefused", "run", "capture", "TaskRequest", "TaskStatus",
    "SessionResult", "Trace", "PolarError", "__version__",
)  # fmt: skip

PROGRAM = """
import sys
import polar
def loaded():
    return sorted({"torch", "transformers", "fastapi", "aiohttp", "pydantic", "msgspec", "numpy"} & set(sys.modules))
print(loaded(), sorted(name for name in sys.modules if name.startswith("polar.")))
for name in polar.__all__:
    assert getattr(polar, name) is getattr(polar, name), name
heavy = {"torch", "transformers", "fastapi"} & set(loaded())
assert not heavy, heavy
"""


def read_typing_imports() -> dict[str, str]:
    """The names that type checkers see: module:attribute by name."""
    tree = ast.parse(Path(polar.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    return {
        alias.asname or alias.name: f"{node.module}:{alias.name}"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_all_names_are_declared_in_each_place() -> None:
    assert sorted(polar.__all__) == sorted(NAMES)
    assert read_typing_imports() == polar._LAZY_NAMES
    assert set(polar._LAZY_NAMES) | {"__version__"} == set(polar.__all__)
    assert set(polar.__all__) <= set(dir(polar))


@pytest.mark.parametrize("name", NAMES)
def test_every_name_can_be_imported_and_says_what_it_is(name: str) -> None:
    value = getattr(polar, name)
    assert name == "__version__" or value.__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'polar' has no attribute 'nothing'"):
        _ = polar.nothing  # type: ignore[attr-defined]


def test_importing_polar_imports_nothing_else() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stdout.strip()) == (0, "[] []"), done.stderr


def test_the_package_is_typed() -> None:
    assert (Path(polar.__file__).parent / "py.typed").exists()


def test_the_version_is_the_distributions() -> None:
    assert polar.__version__ == metadata.version("polar-rl")


def test_without_an_installed_distribution_the_version_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distribution, "DISTRIBUTION", "no-such-distribution")
    assert distribution.installed_version() == "0+unknown"
