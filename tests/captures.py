"""Requests that real harnesses sent, recorded in real runs (prose replaced by pseudo-words of equal length)."""

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "fixtures" / "captures"


@cache
def load(name: str) -> list[dict[str, Any]]:
    """One record per request, in order: n, t, method, path, query, headers, body, and resp or resp_sse."""
    with gzip.open(FOLDER / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@cache
def names() -> tuple[str, ...]:
    return tuple(sorted(path.name.removesuffix(".jsonl.gz") for path in FOLDER.glob("*.jsonl.gz")))


@cache
def names_for(path_prefix: str) -> tuple[str, ...]:
    """The captures whose requests go to paths that begin so."""
    return tuple(name for name in names() if load(name)[0]["path"].startswith(path_prefix))
