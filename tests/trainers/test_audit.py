"""polar verify --from verl reads what verl itself saves, without verl, and finds what is wrong in it."""

from pathlib import Path
from typing import Any

import pytest

from polar.audit.audit import audit
from polar.audit.formats import read
from polar.audit.rows import RawRow
from tests.trainers.running import found_by
from tests.unit.audit.rollouts import Policy, fields, small, teacher

pytestmark = pytest.mark.trainers


def line(number: int, one: RawRow) -> dict[str, Any]:
    return {
        "prompt_ids": one.prompt,
        "response_ids": one.response,
        "response_mask": one.mask,
        "response_logprobs": one.logprobs,
        "reward_score": 1.0,
        "num_turns": 6,
        "metrics": {},
        "extra_fields": {"task_id": f"t{number}"},
    }


def test_batches_that_verl_saved(tmp_path: Path) -> None:
    model = small()
    policy = Policy(model)
    made = [fields(policy, 3), fields(policy, 2), fields(policy, 3, spliced=2)]
    asked = {"rows": [line(number, one) for number, one in enumerate(made)], "folder": str(tmp_path)}
    files = found_by("save_verl.py", "batches", asked, tmp_path)
    assert len(files) == 4
    for file in files:
        report = audit(read("verl", Path(file)), teacher(model), tolerance=1e-4)
        assert [(row.trained, row.verdict) for row in report.rows] == [(18, "clean"), (12, "clean"), (18, "splice")]
        assert report.rows[2].problems[0].turn == 2
