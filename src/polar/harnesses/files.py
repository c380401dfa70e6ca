"""A harness's config files: their formats, and writing them into a private home."""

import json
from pathlib import Path
from typing import Any

from polar.harnesses.base import HarnessSetup


def as_json(content: Any) -> str:
    """Any: the content is a document in the harness's own format."""
    return json.dumps(content, indent=2) + "\n"


def toml_string(text: str) -> str:
    """A JSON string is a TOML string, too, but for characters that either spells in its own way."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def write_setup(setup: HarnessSetup, home: Path) -> None:
    for name, content in setup.files.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
