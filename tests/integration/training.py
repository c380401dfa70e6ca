"""Tasks that a tiny model with random weights can learn: to say something with the letter e in it at last."""

import json
import sys
from pathlib import Path
from typing import Any

AGENT = Path(__file__).with_name("train_agent.py")


def task(name: str, turns: int, tokens: int) -> dict[str, Any]:
    return {
        "task_id": name,
        "instruction": f"Say {name}.",
        "timeout_seconds": 120,
        "runtime": {"backend": "local"},
        "agent": {"custom_shell": {"command": f"{sys.executable} -S -E {AGENT} {turns} {tokens}"}},
        "evaluator": {"strategy": "answer", "config": {"expected": "e.?$", "match": "regex", "pattern": "(?s)(.+)"}},
    }


def write_tasks(folder: Path, turns: int = 2, tokens: int = 6) -> None:
    """train.jsonl, with four tasks, and held_out.jsonl with two."""
    for file, names in (("train", "abcd"), ("held_out", "xy")):
        lines = [json.dumps(task(f"say-{name}", turns, tokens)) for name in names]
        (folder / f"{file}.jsonl").write_text("\n".join(lines))
