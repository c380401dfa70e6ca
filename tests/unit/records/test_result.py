"""Results as existing bridges import and read them."""

import subprocess
import sys

from polar.records import result, task
from polar.rollout import models


def test_bridges_find_all_records_under_their_old_name() -> None:
    for name in models.__all__:
        assert any(getattr(models, name) is getattr(module, name, None) for module in (result, task))


def test_reading_results_takes_no_array_library() -> None:
    program = "import sys, polar.records.result, polar.records.task; print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
