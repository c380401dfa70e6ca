"""The generated reference has everything that is in the code, each with a description."""

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

import polar
from polar import testing
from polar.config import Settings
from polar.records.task import TaskRequest
from polar.train.settings import TrainSettings
from tools.docs import reference

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return reference.build_reference()


@pytest.mark.parametrize(
    ("page", "model"), [("settings.md", Settings), ("tasks.md", TaskRequest), ("training.md", TrainSettings)]
)
def test_every_setting_is_described(pages: dict[str, str], page: str, model: type[BaseModel]) -> None:
    rows = re.findall(r"^\| `([^`]+)` \| .* \|(.*)\|$", pages[page], re.MULTILINE)
    listed = {name for name, _ in rows}
    for name, field in reference.collect_settings(model):
        short = name if page != "settings.md" else name.removeprefix("judges.NAME.").partition(".")[2] or name
        if page != "settings.md" or "." in name:
            assert short in listed or name.removeprefix("judges.NAME.") in listed, name
        nested = any(other.startswith(f"{name}.") for other, _ in reference.collect_settings(model))
        assert field.description or nested, f"{model.__name__}.{name} has no description"


def test_every_command_and_option_is_there(pages: dict[str, str]) -> None:
    page = pages["cli.md"]
    for name, command in reference.collect_commands():
        _, found, section = page.partition(f"## `{name}`\n")
        assert found, name
        section = section.split("\n## ")[0]
        assert command.help, f"{name} has no help"
        for option in command.params:
            if option.param_type_name == "option" and not getattr(option, "hidden", False):
                assert option.opts[-1] in section, f"{name} {option.opts}"


def test_every_route_of_the_control_plane_is_there(pages: dict[str, str]) -> None:
    for method, path, operation in reference.collect_operations(reference.build_app().openapi()):
        assert f"## `{method} {path}`\n" in pages["http-api.md"]
        assert operation.get("description") or operation.get("summary")


def test_every_route_of_the_data_plane_is_there(pages: dict[str, str]) -> None:
    routes = list(reference.collect_dialect_routes())
    assert ("POST", "/v1/chat/completions", "openai_chat") in routes
    for method, path, dialect in routes:
        escaped = path.replace("|", "\\|")
        assert f"| `{method} {escaped}` | {dialect} |" in pages["data-plane.md"]
        assert "?" not in path, f"a pattern that nobody can read: {path}"


def test_every_public_name_is_there(pages: dict[str, str]) -> None:
    for name in polar.__all__:
        assert f"## `polar.{name}`\n" in pages["python-api.md"]
    for name in testing.__all__:
        assert f"| `{name}` |" in pages["python-api.md"]
    assert " at 0x" not in pages["python-api.md"]


def test_every_plugin_is_there(pages: dict[str, str]) -> None:
    for group, points in reference.collect_plugins().items():
        for point in points:
            assert f"| `{point.name}` | `{point.value}` |" in pages["plugins.md"], group


def test_every_generated_page_is_in_the_navigation(pages: dict[str, str]) -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    for name in pages:
        assert f"reference/{name}" in navigation
