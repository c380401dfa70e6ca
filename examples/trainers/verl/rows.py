"""verl's data: a row for each task.

    python examples/trainers/verl/rows.py TASKS... -o tasks.parquet

Tasks are files or folders, as `polar run` reads them.
"""

import argparse

import pyarrow as pa
import pyarrow.parquet as pq

from polar.bridges.verl import build_rows
from polar.client.submission import load_tasks


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("tasks", nargs="+")
    parser.add_argument("-o", "--output", required=True)
    asked = parser.parse_args()
    table = pa.Table.from_pylist(build_rows(load_tasks(asked.tasks)))
    pq.write_table(table, asked.output)
    print(f"{table.num_rows} tasks in {asked.output}")


if __name__ == "__main__":
    main()
