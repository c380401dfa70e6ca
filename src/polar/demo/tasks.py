"""Questions as tasks: the book is in the workspace, the agent writes its answer there, and the right one earns 1.

    python -m polar.demo.tasks FOLDER [--hops N] [--digits N] [--train N] [--held-out N] [--seed N]

writes FOLDER/train.jsonl and FOLDER/held-out.jsonl.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polar.demo.questions import Question, Questions, make_questions
from polar.errors import ConfigError

_TIMEOUT_SECONDS = 300.0  # generous, since many sessions share a laptop's cores

_HARNESS_INSTRUCTION = """\
The file book.txt has a line for each name. {question} If its line says to see another name, go on with that one's. \
Write the number, and nothing else, to the file answer.txt.\
"""


def find_agent_file() -> Path:
    """Finds examples/lookup/agent.py in a checkout or in the installed package."""
    folder = Path(__file__)
    for path in (folder.with_name("agent.py"), folder.parents[3] / "examples" / "lookup" / "agent.py"):
        if path.exists():
            return path
    raise ConfigError(
        "The demo's agent, examples/lookup/agent.py, is not there: install Polar again, or name --harness."
    )


def make_task(question: Question, lookups: int, harness: str | None = None, options: str = "") -> dict[str, Any]:
    """A task for the demo's agent, with extra `options` for its command, or for another harness."""
    book = {"type": "upload_file", "content": question.book_text, "target": "book.txt"}
    task: dict[str, Any] = {
        "task_id": question.name.lower(),
        "timeout_seconds": _TIMEOUT_SECONDS,
        "evaluator": {
            "strategy": "answer",
            "config": {"expected": question.answer, "match": "exact", "file": "answer.txt"},
        },
    }
    if harness is not None:
        instruction = _HARNESS_INSTRUCTION.format(question=question.text)
        return task | {
            "instruction": instruction,
            "runtime": {"backend": "local", "prepare": [book]},
            "agent": {"harness": harness},
        }
    command = f"{shlex.quote(sys.executable)} -P agent.py --lookups {lookups} {options} {{{{INSTRUCTION}}}}"
    agent = {"type": "upload_file", "source": str(find_agent_file()), "target": "agent.py"}
    return task | {
        "instruction": question.text,
        "runtime": {"backend": "local", "prepare": [agent, book]},
        "agent": {"custom_shell": {"command": command}},
    }


def write_tasks(
    folder: Path, questions_by_split: Questions, hops: int, harness: str | None = None, options: str = ""
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, questions in (("train", questions_by_split.train), ("held-out", questions_by_split.held_out)):
        lines = [json.dumps(make_task(question, hops, harness, options)) + "\n" for question in questions]
        (folder / f"{name}.jsonl").write_text("".join(lines))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m polar.demo.tasks", description="Writes the demo's tasks.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hops", type=int, default=1, help="look-ups that a question takes [1]")
    parser.add_argument("--digits", type=int, default=2, help="of the numbers [2]")
    parser.add_argument("--train", type=int, default=96, help="questions [96]")
    parser.add_argument("--held-out", type=int, default=32, help="questions [32]")
    parser.add_argument("--seed", type=int, default=0, help="[0]")
    parser.add_argument("--harness", help="that answers [the agent of examples/lookup]")
    options = parser.parse_args(arguments)
    questions = make_questions(
        train=options.train,
        held_out=options.held_out,
        seed=options.seed,
        hops=options.hops,
        digits=options.digits,
    )
    write_tasks(options.folder, questions, options.hops, options.harness)


if __name__ == "__main__":
    main()
