"""Ends with 0 if sorted.csv has the rows of staff.csv in the order that was asked for."""

import csv
import sys
from pathlib import Path


def rows(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


header, *staff = rows(Path(__file__).parent / "staff.csv")
staff.sort(key=lambda row: (row[1], -int(row[2]), row[0]))
if (found := rows(Path("sorted.csv"))) != [header, *staff]:
    sys.exit(f"sorted.csv holds {found}")
