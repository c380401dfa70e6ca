"""The rows of OpenRLHF's data: a task each.

    python examples/trainers/openrlhf/rows.py TASKS... > rows.jsonl

Tasks are files or folders, as `polar run` reads them.
"""

import json
import sys

from polar.client.submission import load_tasks


def main() -> None:
    for task in load_tasks(sys.argv[1:]):
        print(json.dumps({"prompt": task.instruction, "task_id": task.task_id}))


if __name__ == "__main__":
    main()
