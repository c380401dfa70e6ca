"""Ends with 0 if stats.py is right, by calls that the agent has not seen. Its code runs in a process of its own, which
finds neither this file nor the expected values."""

import contextlib
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

LISTS = [[5], [2, 1], [7, 3, 5], [10, -4, 0, 3], [1.5, 1.5, -2, 8, 0.25], [3, 3, 1, 9, 9, 2], []]
CALLS = """
import json, sys
sys.path.insert(0, ".")
import stats
results = []
for values in json.load(sys.stdin):
    for name in ("mean", "median", "spread"):
        given = list(values)
        try:
            result = getattr(stats, name)(given)
        except ValueError:
            result = "ValueError"
        results.append([result, given])
print(json.dumps(results))
"""


FUNCTIONS = (statistics.mean, statistics.median, lambda values: max(values) - min(values))
expected = [[function(values) if values else "ValueError", values] for values in LISTS for function in FUNCTIONS]

with contextlib.suppress(ImportError):
    import ctypes

    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: nobody reads or writes this process's memory
shutil.rmtree(Path(__file__).parent)
ran = subprocess.run(
    [sys.executable, "-I", "-c", CALLS], input=json.dumps(LISTS), capture_output=True, text=True, timeout=20
)
sys.stderr.write(ran.stderr)
if ran.returncode != 0 or json.loads(ran.stdout) != expected:
    sys.exit(f"stats.py gives wrong results: {ran.stdout}")
