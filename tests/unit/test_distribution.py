"""The distribution's name: one constant, and nothing that names another."""

import re
import tomllib
from pathlib import Path

import pytest

from polar.distribution import DISTRIBUTION, install_hint

ROOT = Path(__file__).parents[2]
FOLDERS = ["src", "docs", "examples", "benchmarks", "tools"]
FILES = ["README.md", "ARCHITECTURE.md", "Makefile", "pyproject.toml"]
SUFFIXES = {".py", ".md", ".toml", ".yaml", ".yml", ".sh", ".txt", ""}
EXTRA = re.compile(r"""(?<![\w./-])polar\[|\binstall\s+(-\w+\s+)*["']?polar(?![\w-])""")
OWN_EXTRA = re.compile(r"polar-rl\[([a-z,]+)\]")


def read_texts() -> list[tuple[Path, str]]:
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*")) if file.suffix in SUFFIXES]
    return [(file, file.read_text()) for file in (*files, *(ROOT / name for name in FILES)) if file.is_file()]


def read_project() -> dict[str, object]:
    project: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project


def test_the_constant_is_the_projects_name() -> None:
    assert read_project()["name"] == DISTRIBUTION
    assert install_hint("arrow") == "pip install 'polar-rl[arrow]'"


def test_nobody_is_told_to_install_another_project() -> None:
    texts = read_texts()
    assert len(texts) > 500
    assert [file for file, text in texts if EXTRA.search(text)] == []


def test_hints_name_extras_that_exist() -> None:
    extras = read_project()["optional-dependencies"]
    assert isinstance(extras, dict)
    hints = re.compile(r"""install_hint\(["'](\w+)["']\)""")
    named = {
        extra
        for _, text in read_texts()
        for found in (*OWN_EXTRA.findall(text), *hints.findall(text))
        for extra in found.split(",")
    }
    assert named
    assert named <= set(extras)


@pytest.mark.parametrize("text", ["pip install 'polar[train]'", "with polar[otel]", "pip install polar"])
def test_the_check_finds_the_old_name(text: str) -> None:
    assert EXTRA.search(text)


@pytest.mark.parametrize("text", ["polar-rl[train]", "pip install polar-rl", "rows.polar[0]"])
def test_the_check_leaves_other_names_alone(text: str) -> None:
    assert not EXTRA.search(text)
