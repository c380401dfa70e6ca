"""Writing a harness's config files into its private home."""

import json
from pathlib import Path
from typing import Any


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Any) -> None:
    """Any: the content is a document in the harness's own format."""
    write(path, json.dumps(content, indent=2) + "\n")
