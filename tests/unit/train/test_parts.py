"""The small parts: order of tasks, settled groups, files, metrics, curve and picture."""

import io
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from polar.cli.train import TrainProgress, render_reward_curve
from polar.errors import ConfigError
from polar.train.checkpoint import CheckpointStore, JournalEntry, create_folder_atomically, truncate_after_step
from polar.train.metrics import GpuMonitor, MetricsLog, StepMetrics, plot_rewards
from polar.train.rollouts import SettledGroups, TaskOrder
from polar.train.settings import TrainSettings
from tests.conditions import wait_until

SETTINGS = TrainSettings(steps=3, tasks={"train": ["x"]})


@given(st.integers(1, 6), st.integers(0, 5))
def test_each_epoch_has_every_task(tasks: int, seed: int) -> None:
    names = [f"t{number}" for number in range(tasks)]
    order = TaskOrder(names, seed)
    for epoch in range(3):
        found = [order.get_epoch_and_task(index) for index in range(epoch * tasks, (epoch + 1) * tasks)]
        assert sorted(found) == sorted((epoch, name) for name in names)
        assert [order.get_group_index(*one) for one in found] == list(range(epoch * tasks, (epoch + 1) * tasks))


def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    names = [f"t{number}" for number in range(20)]

    def epoch(seed: int, number: int) -> list[str]:
        return [TaskOrder(names, seed).get_epoch_and_task(20 * number + place)[1] for place in range(20)]

    assert epoch(0, 0) == epoch(0, 0)
    assert epoch(0, 0) != epoch(1, 0) != epoch(0, 1) != epoch(0, 0)


@given(st.lists(st.sets(st.integers(0, 30), max_size=5)))
def test_settled_is_a_set(additions: list[set[int]]) -> None:
    settled, expected = SettledGroups(), set()
    for some in additions:
        settled.add(some)
        expected |= some
        again = msgspec.json.decode(msgspec.json.encode(settled), type=SettledGroups)
        assert {index for index in range(31) if index in again} == expected
        assert len(again) == len(expected)


def test_a_folder_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    def half() -> None:
        with create_folder_atomically(tmp_path / "made") as folder:
            (folder / "a").write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        half()
    assert not (tmp_path / "made").exists()
    for text in ("one", "two"):
        with create_folder_atomically(tmp_path / "made") as folder:
            (folder / "a").write_text(text)
        assert (tmp_path / "made" / "a").read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_lines_of_lost_steps_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    lines = [msgspec.json.encode(JournalEntry(step, [f"s{step}"])) + b"\n" for step in range(1, 5)]
    path.write_bytes(b"".join(lines) + lines[0][:7])  # the last one was being written
    assert [entry.step for entry in truncate_after_step(path, 2, JournalEntry)] == [1, 2]
    assert path.read_bytes() == b"".join(lines[:2])
    assert truncate_after_step(tmp_path / "none.jsonl", 2, JournalEntry) == []


def test_a_run_has_one_name(tmp_path: Path) -> None:
    name = CheckpointStore(tmp_path, 1).load_or_create_run_id("x", 0, ["a", "b"])
    assert name.startswith("x-")
    assert CheckpointStore(tmp_path, 1).load_or_create_run_id("y", 0, ["a", "b"]) == name
    for seed, tasks in ((1, ["a", "b"]), (0, ["a"]), (0, ["b", "a"])):
        with pytest.raises(ConfigError, match="name another output folder"):
            CheckpointStore(tmp_path, 1).load_or_create_run_id("x", seed, tasks)


def test_metrics_go_on_where_they_were(tmp_path: Path) -> None:
    for steps in ([0, 1, 2], [2, 3]):
        with MetricsLog(tmp_path, SETTINGS, steps[0] - 1, "x") as metrics:
            for step in steps:
                metrics.write(StepMetrics(step, step, reward=0.5))
    assert [told.step for told in metrics.history] == [0, 1, 2, 3]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [msgspec.json.decode(line)["step"] for line in lines] == [0, 1, 2, 3]


def test_tensorboard_has_every_number(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = SETTINGS.model_copy(update={"metrics": SETTINGS.metrics.model_copy(update={"tensorboard": True})})
    with MetricsLog(tmp_path, settings, 0, "x") as metrics:
        metrics.write(StepMetrics(1, 1, reward=0.25, seconds={"sync": 2.0}))
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Scalars("reward")[0].value == 0.25
    assert events.Scalars("seconds/sync")[0].step == 1


def test_tensorboard_forgets_the_steps_that_were_lost(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = SETTINGS.model_copy(update={"metrics": SETTINGS.metrics.model_copy(update={"tensorboard": True})})
    for after, steps, reward in ((0, [0, 1, 2, 3], 0.25), (1, [2, 3, 4], 0.75)):
        with MetricsLog(tmp_path, settings, after, "x") as metrics:
            for step in steps:
                metrics.write(StepMetrics(step, step, reward=reward))
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = [(event.step, event.value) for event in events.Scalars("reward")]
    assert found == [(0, 0.25), (1, 0.25), (2, 0.75), (3, 0.75), (4, 0.75)]


def test_wandb_drops_no_step_that_is_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B ignores what is logged with a `step` below its own."""
    logged: list[tuple[float, int | None]] = []
    axes: list[tuple[str, str]] = []
    run = SimpleNamespace(
        define_metric=lambda name, step_metric: axes.append((name, step_metric)),
        log=lambda numbers, step=None: logged.append((numbers["step"], step)),
        finish=lambda: None,
    )
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: run))
    settings = SETTINGS.model_copy(update={"metrics": SETTINGS.metrics.model_copy(update={"wandb": "project"})})
    with MetricsLog(tmp_path, settings, 1, "x") as metrics:
        metrics.write(StepMetrics(2, 2))
    assert (logged, axes) == ([(2, None)], [("*", "step")])


async def test_how_busy_the_gpus_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 50\necho '[N/A]'\necho 100\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    async with GpuMonitor(enabled=False) as watch:
        assert watch.take_utilization() is None
    async with GpuMonitor(enabled=True) as watch:
        await wait_until(lambda: len(watch.utilizations) == 2)
        assert watch.take_utilization() == 0.75
        assert watch.take_utilization() is None


HISTORY = [StepMetrics(step, step, reward=step / 10, held_out=0.5 if step in (0, 9) else None) for step in range(10)]


def test_the_curve_rises() -> None:
    lines = render_reward_curve(HISTORY).plain.splitlines()
    heights = [sum(line[6 + place] != " " for line in lines[:8]) for place in range(10)]
    assert heights == sorted(heights)
    assert heights[-1] > heights[1]
    assert lines[-1] == "held out 0.50 → 0.50"
    assert render_reward_curve([]).plain == ""


def test_without_a_terminal_each_step_is_a_line() -> None:
    console = Console(record=True, width=40, file=io.StringIO())
    shown = TrainProgress(console, silent=False)
    shown.on_begin(HISTORY[:3], 10)
    shown.on_step(HISTORY[3])
    assert console.export_text().splitlines() == ["Going on behind step 2.", "step 3/10   reward 0.300"]


def test_on_a_terminal_it_is_drawn() -> None:
    console = Console(record=True, width=120, force_terminal=True, file=io.StringIO())
    shown = TrainProgress(console, silent=False)
    shown.on_begin(HISTORY, 20)
    shown.on_wait(3, 8)
    console.print(shown)
    text = console.export_text()
    assert "step 9 of 20   sampling: 3 of 8 groups" in text
    assert "held out 0.50 → 0.50" in text


def test_a_picture(tmp_path: Path) -> None:
    for history in (HISTORY, []):
        plot_rewards(history, tmp_path / "reward.png", "x")
        assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
