"""TRL's own loops over Polar's sessions, in the trainers' environment (`make test-trainers`)."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.bridging import Served, served, task

pytestmark = pytest.mark.trainers

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".cache" / "trainers" / "venv" / "bin" / "python"
PROGRAM = Path(__file__).with_name("trl_loops.py")


def run(what: str, it: Served, folder: Path, *launcher: str, **more: Any) -> None:
    """A function of trl_loops.py."""
    if not PYTHON.exists():
        pytest.fail("The trainers are not installed: run `make test-trainers`")
    even = [task(f"even-{kind}", kind) for kind in ("split", "plain")]
    for one in even:
        one["evaluator"]["config"]["expected"] = "[a-m].?$"
    tasks = folder / "even.jsonl"
    tasks.write_text("\n".join(json.dumps(one) for one in even))
    given = {
        "settings": it.settings(tasks=[str(it.tasks), str(tasks)]),
        "even": [one["task_id"] for one in even],
        "model": str(it.model),
        "output": str(folder / "output"),
        "engine": {"kind": "embedded", "options": {"dtype": "float32"}},
    }
    file = folder / "given.json"
    file.write_text(json.dumps(given | more))
    own = {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    command = [PYTHON, *launcher, PROGRAM, what, file]
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("what", ["grpo", "split", "refused", "asynchronous"])
def test_its_loop(what: str, tmp_path: Path) -> None:
    with served(tmp_path) as it:
        run(what, it, tmp_path)


def test_several_processes_do_what_one_does(tmp_path: Path) -> None:
    """They ask for the same groups, and the gradient is that of all tokens, wherever they are."""
    alone, together = tmp_path / "alone.pt", tmp_path / "together.pt"
    with served(tmp_path) as it:
        run("processes", it, tmp_path, rows=12, moved=str(alone))
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
        run("processes", it, tmp_path, *torchrun, rows=6, moved=str(together))
    whole, parts = torch.load(alone), torch.load(together)
    assert max(float(change.abs().max()) for change in whole.values()) > 1e-3
    for name, change in whole.items():
        torch.testing.assert_close(parts[name], change, rtol=1e-3, atol=1e-6)
