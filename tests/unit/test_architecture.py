"""What ARCHITECTURE.md and the packages' READMEs say of the code is true of it: every name exists, every package is
there, and the layers are those of the contract in pyproject.toml.

The source is read, not imported: some of it needs what isn't installed everywhere."""

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
POLAR = ROOT / "src" / "polar"
DOCUMENT = (ROOT / "ARCHITECTURE.md").read_text()

MAX_LINES = 200
README_LINES = range(8, 31)

Scope = ast.Module | ast.ClassDef


class Place(NamedTuple):
    """Where a name is defined: a module or class, and the module around it."""

    scope: Scope
    module: Path


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def modules() -> list[Path]:
    return sorted(path for path in POLAR.rglob("*.py") if "__pycache__" not in path.parts)


def find_module(parts: tuple[str, ...]) -> Path | None:
    """The file of a module whose dotted name ends in `parts`, below polar."""
    for path in (POLAR.joinpath(*parts).with_suffix(".py"), POLAR.joinpath(*parts, "__init__.py")):
        if path.is_file():
            return path
    return None


def defined_names(scope: Scope) -> Iterator[tuple[str, ast.stmt]]:
    for statement in scope.body:
        if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield statement.name, statement
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id, statement
        elif isinstance(statement, ast.Assign):
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    yield target.id, statement


def is_defined(place: Place, names: tuple[str, ...]) -> bool:
    """Whether a dotted name can be followed from a module or class, base classes of the same module included."""
    if not names:
        return True
    for name, statement in defined_names(place.scope):
        if name == names[0]:
            if isinstance(statement, ast.ClassDef):
                return is_defined(Place(statement, place.module), names[1:])
            return len(names) == 1
    if isinstance(place.scope, ast.ClassDef):
        bases = {base.id for base in place.scope.bases if isinstance(base, ast.Name)}
        return any(
            is_defined(Place(statement, place.module), names)
            for name, statement in defined_names(parse(place.module))
            if name in bases and isinstance(statement, ast.ClassDef)
        )
    return False


@cache
def classes_and_functions() -> dict[str, list[Place]]:
    found: dict[str, list[Place]] = {}
    for path in modules():
        for name, statement in defined_names(parse(path)):
            scope = statement if isinstance(statement, ast.ClassDef) else parse(path)
            found.setdefault(name, []).append(Place(scope, path))
    return found


@cache
def identifiers() -> frozenset[str]:
    """Names of functions, methods and fields, and words that stand in strings of the code: reasons, statuses."""
    found: set[str] = set()
    for path in modules():
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return frozenset(found)


def exists(name: str, folder: Path = POLAR) -> bool:
    """Whether what stands in backticks exists: a command, a file, or a dotted name, from polar or a module on."""
    command = name.split()
    if command[0] == "make":
        return re.search(rf"(?m)^{re.escape(command[1])}:", (ROOT / "Makefile").read_text()) is not None
    if command[0] == "polar" and len(command) > 1:
        return find_module(("cli", command[1])) is not None
    if "/" in name or name.endswith((".py", ".md", ".sql", ".toml")):
        return name in identifiers() or any((start / name).exists() for start in (ROOT, ROOT / "src", POLAR, folder))
    if name.isidentifier() and any(
        (start / f"{name}{end}").exists() for start in (ROOT, folder) for end in ("", ".py")
    ):
        return True
    parts = tuple(name.removeprefix("polar.").split("."))
    for start in ((), folder.relative_to(POLAR).parts) if folder.is_relative_to(POLAR) else ((),):
        for length in range(len(parts), 0, -1):
            module = find_module(start + parts[:length])
            if module is not None and is_defined(Place(parse(module), module), parts[length:]):
                return True
    if len(parts) == 1:
        return parts[0] in identifiers()
    places = classes_and_functions().get(parts[0], ())
    return any(isinstance(place.scope, ast.ClassDef) and is_defined(place, parts[1:]) for place in places)


def quoted_names(text: str) -> list[str]:
    """What stands in backticks, and what looks like a name of the code in a drawing."""
    drawings = " ".join(re.findall(r"(?m)^    .*", text))
    drawn = re.findall(r"(?<![\w./-])(?:[A-Z][a-z]+(?:[A-Z][a-z]+)+|[a-z]+(?:_[a-z]+)+)(?:\.\w+)*(?![\w/-])", drawings)
    return sorted({*re.findall(r"`([^`\n]+)`", text), *drawn})


def packages() -> list[Path]:
    return sorted(path.parent for path in POLAR.glob("*/__init__.py"))


def contracts() -> list[dict[str, Any]]:
    configured = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found: list[dict[str, Any]] = configured["tool"]["importlinter"]["contracts"]
    return found


def contract_layers() -> list[set[str]]:
    """The layers from top to bottom, each a set of names below polar."""
    layers = next(contract["layers"] for contract in contracts() if contract["name"].startswith("Imports between"))
    return [{name.strip().removeprefix("polar.") for name in layer.split("|")} for layer in layers]


# ARCHITECTURE.md


def test_it_is_short() -> None:
    assert len(DOCUMENT.splitlines()) <= MAX_LINES


def test_every_name_in_it_exists() -> None:
    assert [name for name in quoted_names(DOCUMENT) if not exists(name)] == []


def tree_layers() -> list[set[str]]:
    layers: list[set[str]] = []
    for peer, name in re.findall(r"(?m)^    (\| )?(\w+)(?:/|\.py) ", DOCUMENT[DOCUMENT.index("## The tree") :]):
        if not peer:
            layers.append(set())
        layers[-1].add(name)
    return layers


def test_its_tree_is_that_of_the_contract() -> None:
    *layers, testing = tree_layers()
    assert layers == contract_layers()
    assert testing == {"testing"}


def test_every_package_and_module_is_in_its_tree() -> None:
    found = {path.name for path in packages()} | {path.stem for path in POLAR.glob("*.py")} - {"__init__"}
    assert set().union(*tree_layers()) == found | {"benchmarks"}


@pytest.mark.parametrize(
    "name",
    [
        "gateway.app.Gateway.hande",
        "gateway.ap",
        "Gateway.hande",
        "gateway/ap.py",
        "polar upp",
        "make tset",
        "no_such_name",
    ],
)
def test_a_name_that_does_not_exist_is_found(name: str) -> None:
    assert not exists(name)


# The packages' READMEs


def readmes() -> list[Path]:
    return [folder / "README.md" for folder in (ROOT / "benchmarks", *packages())]


def import_sentence(name: str) -> str:
    """What a README says of a package's place among the layers."""
    layers = contract_layers()
    place = next((number for number, layer in enumerate(layers) if name in layer), -1)
    if name == "testing":
        imports, importers = "everything", "tests alone"
    elif name == "benchmarks":
        imports, importers = "everything but `cli`", "nothing"
    elif name == "records":  # has a contract of its own
        lower = set().union(*layers[place + 1 :]) - set(forbidden_to_records())
        imports, importers = _enumerate(lower), f"{_enumerate(layers[place - 1])} and the layers above"
    else:
        unknown = f", but not {_enumerate(layers[place] - {name})}" if len(layers[place]) > 1 else ""
        imports = f"{_enumerate(layers[place + 1])} and the layers below{unknown}"
        importers = f"{_enumerate(layers[place - 1])} and the layers above" if name != "cli" else "nothing"
    return f"May import: {imports}. May be imported by: {importers}."


def forbidden_to_records() -> list[str]:
    contract = next(contract for contract in contracts() if contract.get("source_modules") == ["polar.records"])
    return [name.removeprefix("polar.") for name in contract["forbidden_modules"]]


@pytest.mark.parametrize("path", readmes(), ids=lambda path: path.parent.name)
def test_a_readme_says_what_is_true(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) in README_LINES
    assert [name for name in quoted_names(text) if not exists(name, path.parent)] == []


@pytest.mark.parametrize("path", readmes(), ids=lambda path: path.parent.name)
def test_a_readme_has_the_layers_of_the_contract(path: Path) -> None:
    text = " ".join(path.read_text().split())
    assert text.endswith(import_sentence(path.parent.name))


def _enumerate(names: set[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))
