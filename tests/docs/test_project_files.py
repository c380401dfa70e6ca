"""The files that a project is judged by at first sight."""

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_the_licence_is_there() -> None:
    assert PROJECT["license"] == "Apache-2.0"
    for name in PROJECT["license-files"]:
        assert "Apache License" in (ROOT / name).read_text(encoding="utf-8")


def test_the_version_has_a_section_of_the_changelog() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## (.+)$", changelog, re.MULTILINE)
    assert sections[0] == "Unreleased"
    assert PROJECT["version"] in sections


def test_extras_that_documents_and_errors_name_exist() -> None:
    extras = set(PROJECT["optional-dependencies"])
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    for file in files:
        for named in re.findall(r"\bpolar(?:-rl)?\[([\w,-]+)\]", file.read_text(encoding="utf-8")):
            assert set(named.split(",")) <= extras, f"{file.relative_to(ROOT)} names {named}"


def test_issue_templates_and_hooks_can_be_read() -> None:
    for file in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        template = yaml.safe_load(file.read_text(encoding="utf-8"))
        assert file.name == "config.yml" or {"name", "description", "body"} <= set(template)
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert [repository["repo"] for repository in hooks["repos"]] == ["local"], "a hook would be fetched"
