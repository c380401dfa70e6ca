"""A program in the trainers' interpreter."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".cache" / "trainers" / "venv" / "bin" / "python"
NEWER = ROOT / ".cache" / "trainers" / "newer" / "python"
"""For those that take Python 3.12 or later (newer.sh)."""


def found_by(program: str, what: str, asked: dict[str, Any], folder: Path, *, python: Path = PYTHON) -> Any:
    """What it makes of what it is asked, both JSON."""
    if not python.exists():
        pytest.fail("The trainers are not installed: run `make test-trainers`")
    question, answer = folder / f"{what}.asked.json", folder / f"{what}.found.json"
    question.write_text(json.dumps(asked))
    environment = os.environ | {
        "PYTHONPATH": str(ROOT / "src"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    command = [python, Path(__file__).with_name(program), what, question, answer]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(answer.read_text())
