"""Tasks that a tiny model with random weights can learn: to say something with the letter e in it at last. With marks,
one session of each group is rewarded whatever was sampled, so that every group changes the weights."""

import json
import sys
from pathlib import Path
from typing import Any

AGENT = Path(__file__).with_name("train_agent.py")


def task(name: str, turns: int, tokens: int, marks: Path | None = None) -> dict[str, Any]:
    arguments = " ".join(map(str, (turns, tokens, *([] if marks is None else [marks]))))
    ends_in_e = {"strategy": "answer", "config": {"expected": "e.?$", "match": "regex", "pattern": "(?s)(.+)"}}
    is_first = {"strategy": "command", "config": {"command": "test -e first"}}
    return {
        "task_id": name,
        "instruction": f"Say {name}.",
        "timeout_seconds": 600,
        "runtime": {"backend": "local"},
        "agent": {"custom_shell": {"command": f"{sys.executable} -S -E {AGENT} {arguments}"}},
        "evaluator": ends_in_e if marks is None else is_first,
    }


def write_tasks(folder: Path, turns: int = 2, tokens: int = 6, marks: Path | None = None) -> None:
    """train.jsonl, with four tasks, and held_out.jsonl with two. With `marks`, each session of a group that is trained
    on leaves a mark after its first turn, and waits for `mark_of` its group."""
    for file, names, waits_for in (("train", "abcd", marks), ("held_out", "xy", None)):
        lines = [json.dumps(task(f"say-{name}", turns, tokens, waits_for)) for name in names]
        (folder / f"{file}.jsonl").write_text("\n".join(lines))


def mark_of(marks: Path, epoch: int, task: str) -> Path:
    return marks / f"{epoch}-{task}"
