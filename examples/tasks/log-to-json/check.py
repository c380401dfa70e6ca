"""Ends with 0 if report.json holds what it should."""

import json
import sys
from pathlib import Path

found = json.loads(Path("report.json").read_text())
if found != json.loads((Path(__file__).parent / "expected.json").read_text()):
    sys.exit(f"report.json holds {found}")
