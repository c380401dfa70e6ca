"""Tables in which pages explain settings name settings that there are, with the defaults that they have.

A cell of the first column is like "`host` [`127.0.0.1`], `port` [8080]". Defaults in other words ("as memory allows")
are not compared.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from polar.config import NodeSettings, ServerSettings
from polar.engines.embedded.options import EmbeddedOptions
from polar.records.task import TaskRequest
from polar.train.settings import TrainSettings
from tools.docs.reference import collect_settings

ROOT = Path(__file__).parents[2]
_SETTING = re.compile(r"`([a-z_][\w.]*)`(?: \[([^\]]+)\])?")
_TABLES: list[tuple[str, str, type[BaseModel], set[str]]] = [
    ("service.md", "Settings", ServerSettings, set()),
    ("embedded.md", "The embedded engine", EmbeddedOptions, set()),
    ("tasks.md", "Tasks", TaskRequest, {"instruction_file", "storage_mb"}),  # what `polar.tasks` and aliases take
]


def read_table(page: str, heading: str) -> list[str]:
    """The first cells of the rows of all tables below a heading, before the next one."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    section = re.split(rf"^#+ {re.escape(heading)}$", text, flags=re.MULTILINE)[1]
    section = re.split(r"^#+ ", section, flags=re.MULTILINE)[0]
    rows = [line for line in section.splitlines() if line.startswith("| ") or line.startswith("| `")]
    return [row.split(" | ")[0].strip("| ") for row in rows]


def parse_default(text: str) -> Any:
    try:
        return json.loads(text.strip("`"))
    except ValueError:
        return text.strip("`")


@pytest.mark.parametrize(("page", "heading", "model", "others"), _TABLES, ids=[table[0] for table in _TABLES])
def test_settings_and_defaults(page: str, heading: str, model: type[BaseModel], others: set[str]) -> None:
    fields = dict(collect_settings(model))
    leaves = {name.rpartition(".")[2] for name in fields}  # a cell may name a section once for several settings
    found = [match for cell in read_table(page, heading) for match in _SETTING.findall(cell)]
    assert len(found) > 5, "the table was not found"
    for name, default in found:
        field = fields.get(name)
        assert field is not None or name in leaves | others, f"{page}: there is no setting {name}"
        if field is not None and default and isinstance(field.default, (int, float, str)):
            told = parse_default(default)
            if isinstance(told, (type(field.default), int, float)):
                assert told == field.default, f"{page}: {name} is {field.default!r}"


def test_training_settings() -> None:
    fields = dict(collect_settings(TrainSettings))
    leaves = {name.rpartition(".")[2] for name in fields}
    for cell in read_table("training.md", "Settings"):
        for section in re.findall(r"`\[(\w+)\]`", cell):
            assert section in fields, section
    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    section = text.partition("## Settings")[2].partition("\n## ")[0]
    for name, default in _SETTING.findall(section.replace("`[", "").replace("]`", "")):
        if name in leaves and default:
            values = [field.default for key, field in fields.items() if key.rpartition(".")[2] == name]
            told = parse_default(default)
            if isinstance(told, (int, float)):
                assert told in values, f"training.md: {name} is {values}"


def test_stages_of_a_node() -> None:
    named = set(re.findall(r"^(?:# )?(\w+) = ", (ROOT / "docs" / "running.md").read_text(), re.MULTILINE))
    workers = {name for name in NodeSettings.model_fields if name.endswith(("_workers", "_buffer"))}
    assert workers <= named
