"""Exports, read by the trainers' own code (`make test-trainers` installs them under .cache/trainers).

slime and prime-rl are not to be had as packages, and ART's lacks the class in question: tests/unit/export checks those
against their fields. Miles and NeMo Gym are tested with their bridges.
"""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from polar.export.areal import ArealExporter
from polar.export.atif import AtifExporter
from polar.export.base import Exporter, SessionItem
from polar.export.openrlhf import OpenRlhfExporter
from polar.export.parquet import ParquetExporter
from polar.export.prime_rl import PrimeRlExporter
from polar.export.sft import SftExporter
from polar.export.skyrl import SkyRlExporter
from polar.export.tinker import TinkerExporter
from polar.export.trl import TrlExporter
from polar.export.verl import VerlExporter
from polar.records.trajectory import SessionPaths
from polar.testing.conversations import ConversationBuilder, export_items, make_session_item, make_text_parts
from polar.testing.token_paths import make_path

pytestmark = pytest.mark.trainers

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".cache" / "trainers" / "venv" / "bin" / "python"


def of_tokens() -> list[SessionItem]:
    """A session of two traces, the first of two turns; and one of a single call, part of which does not train."""
    several = [
        make_path(0, [11, 12], [13, 14]),
        make_path(1, [11, 12, 13, 14, 15], [16]),
        make_path(2, [19], [18, 17], role="subagent"),
    ]
    cut = make_path(0, [11, 12], [20, 21, 22], session_id="other", trainable=2)
    return [
        make_session_item(SessionPaths("s", several, 0.5), task_id="t"),
        make_session_item(SessionPaths("other", [cut], -1.0), task_id="t"),
    ]


def of_words() -> list[SessionItem]:
    talk = ConversationBuilder()
    talk.add_call(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}], make_text_parts("Hello.")
    )
    return [talk.build_item()]


@pytest.mark.parametrize(
    ("trainer", "make", "sessions"),
    [
        ("verl", VerlExporter, of_tokens),
        ("trl", TrlExporter, of_tokens),
        ("skyrl", SkyRlExporter, of_tokens),
        ("openrlhf", OpenRlhfExporter, of_tokens),
        ("areal", ArealExporter, of_tokens),
        ("tinker", TinkerExporter, of_tokens),
        ("verifiers", PrimeRlExporter, of_tokens),
        ("datasets", ParquetExporter, of_tokens),
        ("atif", AtifExporter, of_words),
        ("sft", SftExporter, of_words),
    ],
)
def test_the_trainer_reads_it(
    trainer: str, make: Callable[[], Exporter], sessions: Callable[[], list[SessionItem]], tmp_path: Path
) -> None:
    if not PYTHON.exists():
        pytest.fail("The trainers are not installed: run `make test-trainers`")
    items = sessions()
    export, expected = tmp_path / "export", tmp_path / "expected.json"
    export.write_bytes(export_items(make(), items))
    traces = [
        {
            "prompt_ids": trace.prompt_ids.tolist(),
            "response_ids": trace.response_ids.tolist(),
            "loss_mask": trace.loss_mask.tolist(),
            "logprobs": [] if trace.logprobs is None else trace.logprobs.tolist(),
            "reward": trace.reward,
        }
        for one in items
        for trace in one.trajectory.traces
    ]
    expected.write_text(json.dumps(traces))
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    command = [PYTHON, Path(__file__).with_name("read_back.py"), trainer, export, expected]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
