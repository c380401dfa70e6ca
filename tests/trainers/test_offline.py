"""Data of real harnesses, collected with a scripted teacher behind an `openai` engine, and killed twice on the way: the
data set is that of a run that nobody disturbed; and a model that learns from it says what it did not say before."""

import contextlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from polar.harnesses import load_harness
from polar.harnesses.cache import find_installation
from tests.harnesses.run import POLAR, ROOT
from tests.integration.test_offline import teacher
from tests.unit.train import tiny

pytestmark = pytest.mark.trainers

HARNESSES = ("pi", "codex", "claude_code")
SAMPLES = 7  # of ten tasks, for each harness
CACHE = ROOT / ".cache" / "polar-harnesses"
TRAINERS = ROOT / ".cache" / "trainers" / "venv" / "bin" / "python"
PLAY = ROOT / "examples" / "plays" / "right.toml"
SFT = ROOT / "examples" / "trainers" / "trl" / "sft.py"
HELD_OUT = ("sort-csv", "write-regex", "write-script")

OWN = re.compile(
    r"x[0-9a-z]{24}"  # names that the gateway gives
    r"|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"  # and that harnesses do
    r"|\b\d+(\.\d+)? ?(ms|s|seconds)\b"
    r"|Chunk ID: \S+"
    r"|\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d)?(\.\d+)?Z?)?"
    r"|\d+ tokens left"  # which depends on how the times above are spelled
)


def start(engine: str, data: Path, harness: str) -> subprocess.Popen[bytes]:
    command = [POLAR, "run", ROOT / "examples" / "tasks", "--harness", harness, "--samples", SAMPLES, "--resume"]
    options = ["--attempts", "3", "--engine", engine, "--kind", "openai", "--data", data, "--workers", "4"]
    variables = {"POLAR_NODE__HARNESS_CACHE": str(CACHE)}
    with (data.parent / f"{data.name}.log").open("ab") as log:
        return subprocess.Popen(
            [str(word) for word in [*command, *options]], env=os.environ | variables, stdout=log, stderr=log
        )


def rewarded(data: Path) -> int:
    if not (data / "polar.db").exists():
        return 0
    with contextlib.closing(sqlite3.connect(f"file:{data / 'polar.db'}?mode=ro", uri=True, timeout=30)) as store:
        try:
            return int(store.execute("SELECT COUNT(*) FROM sessions WHERE reward IS NOT NULL").fetchone()[0])
        except sqlite3.OperationalError:  # it is being made
            return 0


def collect(engine: str, data: Path, kills: list[int]) -> None:
    """`kills`: how many sessions have a reward when the run is killed."""
    for harness in HARNESSES:
        while True:
            running = start(engine, data, harness)
            while running.poll() is None and not (kills and rewarded(data) >= kills[0]):
                time.sleep(0.2)
            if running.poll() is not None:
                assert running.returncode == 0, (data.parent / f"{data.name}.log").read_text()[-3000:]
                break
            running.send_signal(signal.SIGKILL)
            running.wait()
            kills.pop(0)


def export(data: Path, *arguments: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [str(POLAR), "export", "--data", str(data), *arguments], check=True, capture_output=True, text=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def conversations(data: Path) -> Counter[str]:
    """Without what no two runs share: names, times, and the order in which a folder lists its files."""
    rows = export(data, "--format", "sft")
    for message in (message for row in rows for message in row["messages"] if message["role"] == "tool"):
        message["content"] = sorted(str(message["content"]).splitlines())
    return Counter(OWN.sub("", json.dumps([row["metadata"]["task_id"], row["messages"], row["tools"]])) for row in rows)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The data of a run that was killed twice, and of one that was not."""
    missing = [name for name in HARNESSES if find_installation(CACHE, load_harness(name)) is None]
    assert not missing, f"not installed: {', '.join(missing)} (make harnesses)"
    folder = tmp_path_factory.mktemp("offline")
    with teacher("--play", str(PLAY)) as engine:
        collect(engine, folder / "killed", [25, 110])
        collect(engine, folder / "whole", [])
    return folder / "killed", folder / "whole"


def test_a_run_that_is_killed_twice_ends_with_the_same_data(killed: tuple[Path, Path]) -> None:
    stopped, whole = killed
    assert rewarded(whole) == rewarded(stopped) == 10 * SAMPLES * len(HARNESSES)
    assert conversations(stopped) == conversations(whole)
    # What was running when it was killed is known of, and stands in no export: others took its place.
    assert all(row["reason"] is None for row in export(stopped, "--format", "polar"))
    assert len(export(stopped, "--format", "atif")) == 10 * SAMPLES * len(HARNESSES)


def test_what_was_collected_lowers_the_loss_on_held_out_tasks(killed: tuple[Path, Path], tmp_path: Path) -> None:
    rows = export(killed[0], "--format", "sft", "--unique")
    assert len(rows) < 10 * SAMPLES * len(HARNESSES)  # the teacher says the same again and again
    for name, wanted in (("train", False), ("held_out", True)):
        chosen = [row for row in rows if (row["metadata"]["task_id"] in HELD_OUT) == wanted]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps(row) for row in chosen))
    files = [str(tmp_path / "train.jsonl"), str(tmp_path / "held_out.jsonl")]
    options = ["--model", str(tiny.folder(tmp_path / "model")), "--steps", "10", "--rate", "1e-3", "--longest", "4096"]
    done = subprocess.run(
        [str(TRAINERS), str(SFT), *files, *options, "--cpu", "--json"], capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["held_out_rows"] >= len(HELD_OUT)
    assert told["held_out_after"] < told["held_out_before"] - 0.1
