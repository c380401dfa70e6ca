"""The rows of SkyRL's data: a task each.

    python examples/trainers/skyrl/rows.py TASKS... > rows.jsonl

Tasks are files or folders, as `polar run` reads them.
"""

import json
import sys

from polar.client.submission import load_tasks


def main() -> None:
    for task in load_tasks(sys.argv[1:]):
        row = {"prompt": [{"role": "user", "content": task.instruction}], "task_id": task.task_id}
        print(json.dumps(row))


if __name__ == "__main__":
    main()
