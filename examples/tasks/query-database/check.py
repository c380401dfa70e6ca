"""Ends with 0 if top.csv has the right lines in the right order."""

import csv
import sys
from pathlib import Path


def rows(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


if (found := rows(Path("top.csv"))) != rows(Path(__file__).parent / "top.csv"):
    sys.exit(f"top.csv holds {found}")
