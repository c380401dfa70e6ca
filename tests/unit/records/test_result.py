"""Results as existing bridges import and read them."""

import subprocess
import sys

from polar.records import policy, result, task
from polar.records.result import TraceResult
from polar.rollout import models


def test_bridges_find_all_records_under_their_old_name() -> None:
    for name in models.__all__:
        assert any(getattr(models, name) is getattr(module, name, None) for module in (policy, result, task))


def test_reading_results_takes_no_array_library() -> None:
    program = "import sys, polar.records.result, polar.records.task; print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_trace_is_written_as_it_was_read() -> None:
    document = {"prompt_ids": [1], "response_ids": [2], "loss_mask": [1], "unknown": 3}
    trace = TraceResult.model_validate(document)
    assert trace.model_dump(exclude_unset=True) == document
    assert "routed_experts" not in trace.model_dump()
    assert TraceResult.model_validate(document | {"routed_experts": "AA=="}).model_dump()["routed_experts"] == "AA=="
    assert "routed_experts" in TraceResult.model_json_schema(mode="serialization")["properties"]
