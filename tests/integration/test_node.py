"""A node, its stages and its limits: real runtimes (`local`), a real gateway, an engine that plays a script."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from polar.config import load
from polar.errors import ConfigError, StoreError
from polar.gateway import meter
from polar.gateway.meter import Clock, Meter, UsedUpLimit
from polar.node.finished_session import FinishedSession
from polar.node.local import LocalRollout
from polar.node.node import RunningSession
from polar.records.result import SessionResult
from polar.records.task import TaskRequest
from tests.integration.agents import task

ONE_CALL = "print(ask())"
FOR_EVER = "ask(); open('begun', 'w').close(); time.sleep(600)"
GRADED = {"strategy": "session_completed"}


@asynccontextmanager
async def rollout(tmp_path: Path, **sections: dict[str, Any]) -> AsyncIterator[LocalRollout]:
    data = tmp_path / "data"
    async with LocalRollout(
        load(None, {"POLAR_ENGINE__KIND": "scripted"}, {"gateway": {"port": 0}, **sections}), data
    ) as opened:
        yield opened
    assert left_of(data) == []


def left_of(data: Path) -> list[str]:
    """What runtimes and the node keep on disk while they live."""
    kept = [*(data / "runtimes").glob("*/*"), *(data / "node").glob("*")]
    return [str(path) for path in kept]


def running_commands(containing: str) -> list[bytes]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            found.append(path.read_bytes())
    return [command for command in found if containing.encode() in command]


async def one(opened: LocalRollout, wanted: TaskRequest) -> FinishedSession:
    return (await every(opened, wanted))[0]


async def every(opened: LocalRollout, *wanted: TaskRequest) -> list[FinishedSession]:
    return [finished async for finished in opened.run(await opened.plan(wanted))]


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not holds():  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(0.01)


async def test_a_session_goes_through_every_stage_and_is_told(tmp_path: Path) -> None:
    wanted = task(
        ONE_CALL + "; open('new.txt', 'w').write('x\\n'); os.remove('old.txt')",
        runtime={"backend": "local", "prepare": [{"type": "upload_file", "content": "old\n", "target": "old.txt"}]},
        evaluator=GRADED,
        metadata={"note": "kept"},
    )
    async with rollout(tmp_path) as opened:
        plans = await opened.plan([wanted])
        (finished,) = [finished async for finished in opened.run(plans)]
        result = SessionResult.model_validate(await opened.build_result(plans[0], finished))
        session = await opened.plane.store.find_session(finished.session_id)
    assert finished.verdict.reward == 1
    assert (finished.turns, finished.outcome.exit_code) == (1, 0)  # type: ignore[union-attr]
    assert set(finished.seconds) == {"queued", "init", "ready", "run", "waiting", "postrun"}
    assert session is not None
    assert (session.reward, session.status) == (1, "ended")
    assert session.metadata["note"] == "kept"
    assert result.status == "COMPLETED"
    assert result.task_id == "a-task"
    assert result.trajectory is not None
    assert [trace.reward for trace in result.trajectory.traces] == [1]
    assert result.metadata["timing"]["stages"] == finished.seconds
    diff = (finished.folder / "workspace.diff").read_text()
    assert "+++ b/new.txt" in diff
    assert "--- a/old.txt" in diff
    assert json.loads((finished.folder / "verdict.json").read_text())["reward"] == 1
    assert (finished.folder / "agent.log").read_text().strip()


@pytest.mark.parametrize(("budget", "turns"), [({"turns": 2}, 2), ({"tokens": 30}, None)], ids=["turns", "tokens"])
@pytest.mark.parametrize(("policy", "reward", "reason"), [("zero", 0, None), ("mask", None, "length")])
async def test_a_budget_ends_a_session(
    tmp_path: Path, budget: dict[str, int], turns: int | None, policy: str, reward: float | None, reason: str | None
) -> None:
    code = "\nwhile True:\n  try: ask()\n  except urllib.error.HTTPError: time.sleep(0.01)"
    async with rollout(tmp_path) as opened:
        finished = await one(opened, task(code, budget=budget, on_length=policy, evaluator=GRADED))
    assert finished.outcome is not None
    assert finished.outcome.end_reason == "length"
    assert (finished.verdict.reward, finished.verdict.reason) == (reward, reason)
    assert turns is None or finished.turns == turns
    assert finished.tokens <= budget.get("tokens", 1000)


@pytest.mark.parametrize(
    ("policy", "reward", "reason", "status"),
    [("grade", 1, None, "COMPLETED"), ("zero", 0, None, "COMPLETED"), ("mask", None, "timeout", "TIMEOUT")],
)
async def test_a_time_out_still_builds_what_there_is(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    reward: float | None,
    reason: str | None,
    status: str,
) -> None:
    async def used_up(_: Meter, __: float) -> UsedUpLimit:
        """When the agent has done what it is to be graded for."""
        await until(lambda: bool(list((tmp_path / "data" / "runtimes").glob("**/begun"))))
        return "timeout"

    monkeypatch.setattr(Meter, "wait_until_used_up", used_up)
    evaluator = {"strategy": "command", "config": {"command": "test -f begun"}}
    async with rollout(tmp_path) as opened:
        plans = await opened.plan([task(FOR_EVER, on_timeout=policy, evaluator=evaluator)])
        (finished,) = [finished async for finished in opened.run(plans)]
        result = SessionResult.model_validate(await opened.build_result(plans[0], finished))
    assert finished.outcome is not None
    assert (finished.outcome.end_reason, finished.outcome.exit_code) == ("timeout", None)
    assert (finished.verdict.reward, finished.verdict.reason) == (reward, reason)
    assert result.status == status
    assert result.trajectory is not None
    assert sum(sum(trace.loss_mask) for trace in result.trajectory.traces) > 0


class Time:
    """Of the sessions' clocks; it passes when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


async def test_a_clock_stands_still_while_generation_is_paused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []
    time, elapsed = Time(), Clock.get_elapsed_seconds

    def look(clock: Clock) -> float:
        looks.append(elapsed(clock))
        return looks[-1]

    monkeypatch.setattr(meter, "time", time)
    monkeypatch.setattr(Clock, "get_elapsed_seconds", look)
    async with rollout(tmp_path) as opened:
        await opened.plane.pool.pause()
        plans = await opened.plan([task(ONE_CALL, timeout_seconds=0.1, on_timeout="mask", evaluator=GRADED)])
        running = await opened.node.submit(plans[0])
        await until(lambda: opened.get_load().held == 1)
        had = len(looks)
        await until(lambda: len(looks) > had)  # by now the clock knows of the call
        time.now += 3600  # longer than the session has
        had = len(looks)
        await until(lambda: len(looks) > had + 1)
        await opened.plane.pool.resume()
        finished = await running.finished
    assert finished.verdict.reward == 1
    assert set(looks) == {0.0}


async def test_a_clock_is_not_stopped_by_asking_over_and_over(tmp_path: Path) -> None:
    play = tmp_path / "play.json"
    play.write_text(json.dumps({"turns": [{"text": "x", "delay": 0.3}]}))
    engine = {"kind": "scripted", "options": {"play": str(play)}}
    code = (
        "import threading\n"
        "def calls():\n"
        "    while True:\n"
        "        try: ask(stream=True)\n"
        "        except ValueError: pass\n"  # the reply is a stream
        "threading.Thread(target=calls).start(); time.sleep(0.15); calls()"
    )
    async with rollout(tmp_path, engine=engine) as opened:
        finished = await one(opened, task(code, timeout_seconds=2, on_timeout="mask", evaluator=GRADED))
    assert finished.verdict.reason == "timeout"


async def test_a_task_decides_what_is_sampled_with(tmp_path: Path) -> None:
    async with rollout(tmp_path) as opened:
        finished = await one(opened, task("ask(temperature=0.1)", sampling={"temperature": 0.7, "top_p": 1}))
        exchanges = [exchange async for exchange in opened.plane.store.read_exchanges(finished.session_id)]
    assert [exchange.sampling.temperature for exchange in exchanges] == [0.7]


SLEEPS = [{"type": "exec", "command": "sleep 600"}]


@pytest.mark.parametrize("stage", ["queued", "init", "ready", "run", "postrun"])
async def test_cancel_works_in_any_stage_once(tmp_path: Path, stage: str) -> None:
    node = {"init_workers": 1, "ready_buffer": 1, "run_workers": 1, "postrun_workers": 1}
    slow_grader = {"strategy": "command", "config": {"command": "sleep 600"}}
    async with rollout(tmp_path, node=node) as opened:

        async def submit(wanted: TaskRequest) -> RunningSession:
            return await opened.node.submit((await opened.plan([wanted]))[0])

        others = []
        if stage == "ready":
            others = [await submit(task(FOR_EVER))]
            await until(lambda: others[0].stage == "run")
        if stage == "queued":
            others = [await submit(task(ONE_CALL, runtime={"backend": "local", "prepare": SLEEPS}))]
            await until(lambda: others[0].stage == "init")
        prepare = SLEEPS if stage == "init" else []
        code = FOR_EVER if stage == "run" else ONE_CALL
        running = await submit(task(code, runtime={"backend": "local", "prepare": prepare}, evaluator=slow_grader))
        if stage == "queued":
            await until(lambda: opened.get_load().waiting == 1)
        else:
            await until(lambda: running.stage == stage)
        if stage == "run":
            await until(lambda: bool(list((tmp_path / "data" / "runtimes").glob("**/begun"))))
        assert running.cancel()
        assert not running.cancel()
        finished = await asyncio.wait_for(running.finished, 120)
        assert finished.verdict.reason == "cancelled"
        session = await opened.plane.store.find_session(running.session_id)
        assert session is not None
        assert (session.status, session.reason) == ("ended", "cancelled")
        for other in others:
            other.cancel()
            await other.finished


async def test_one_that_is_cancelled_before_it_begins_is_told_too(tmp_path: Path) -> None:
    async with rollout(tmp_path) as opened:
        running = await opened.node.submit((await opened.plan([task(ONE_CALL)]))[0])
        assert running.cancel()
        assert (await running.finished).verdict.reason == "cancelled"


async def test_ready_is_a_bounded_buffer(tmp_path: Path) -> None:
    node = {"init_workers": 2, "ready_buffer": 3, "run_workers": 1, "postrun_workers": 1}
    async with rollout(tmp_path, node=node) as opened:
        plan = (await opened.plan([task(FOR_EVER)]))[0]
        running = [await opened.node.submit(plan, sample) for sample in range(8)]
        await until(lambda: opened.get_load().ready == 3 and opened.get_load().run == 1)
        await asyncio.sleep(0.3)  # nothing more goes on
        load = opened.get_load()
        assert (load.waiting, load.init, load.ready, load.run) == (2, 2, 3, 1)
        first = next(one for one in running if one.stage == "run")
        first.cancel()
        await until(lambda: opened.get_load().run == 1 and opened.get_load().waiting == 1)


async def test_a_grader_finds_its_runtime_ready(tmp_path: Path) -> None:
    evaluator = {"strategy": "command", "config": {"command": "true"}}
    prepare = [{"type": "exec", "command": "echo made >> made.txt"}]
    async with rollout(tmp_path) as opened:
        plans = await opened.plan(
            [task(FOR_EVER, runtime={"backend": "local", "prepare": prepare}, evaluator=evaluator)]
        )
        running = await opened.node.submit(plans[0])
        # While the agent still runs, there are two of them: its own, and the one that waits for the grader.
        await until(lambda: len(list((tmp_path / "data" / "runtimes").glob("**/made.txt"))) == 2)
        assert running.stage == "run"
        running.cancel()
        await running.finished


async def test_runtimes_stand_ready_before_any_task_names_them(tmp_path: Path) -> None:
    async with rollout(tmp_path, node={"prewarm": [{"runtime": {"backend": "local"}, "count": 3}]}) as opened:
        made = lambda: set((tmp_path / "data" / "runtimes").glob("local/*/runtimes/*"))  # noqa: E731
        await until(lambda: len(made()) == 3)
        before = made()
        running = await opened.node.submit((await opened.plan([task(FOR_EVER)]))[0])
        await until(lambda: bool(list((tmp_path / "data" / "runtimes").glob("**/begun"))))
        begun = next((tmp_path / "data" / "runtimes").glob("**/begun"))
        assert any(runtime in begun.parents for runtime in before)
        await until(lambda: len(made()) == 4)  # and another took its place
        running.cancel()
        await running.finished


@pytest.mark.parametrize(
    ("fields", "reason", "said"),
    [
        ({"runtime": {"backend": "local", "prepare": [{"type": "exec", "command": "echo oh >&2; exit 3"}]}},
         "prepare_failed", "oh"),
        ({"agent": {"custom_shell": {"command": "echo nothing to run; exit 4"}}}, "harness_failed", "nothing to run"),
        (
            {"agent": {"harness": "codex", "env": {"PATH": "/usr/bin:/bin"}}},
            "harness_failed",
            "polar harness install",
        ),
    ],
    ids=["prepare", "harness", "missing"],
)  # fmt: skip
async def test_what_the_platform_fails_to_do_is_a_reason(
    tmp_path: Path, fields: dict[str, Any], reason: str, said: str
) -> None:
    async with rollout(tmp_path, node={"harness_cache": str(tmp_path / "none")}) as opened:
        finished = await one(opened, task(ONE_CALL, evaluator=GRADED, **fields))
    assert (finished.verdict.reward, finished.verdict.reason) == (None, reason)
    assert finished.error is not None
    assert said in finished.error


async def test_an_engine_that_fails_is_no_failure_of_the_agents(tmp_path: Path) -> None:
    play = tmp_path / "play.json"
    play.write_text(json.dumps({"turns": [{"text": "x", "fail": 500}]}))
    engine = {"kind": "scripted", "options": {"play": str(play)}}
    async with rollout(tmp_path, engine=engine) as opened:
        finished = await one(opened, task(ONE_CALL, evaluator=GRADED))
    assert (finished.verdict.reward, finished.verdict.reason) == (None, "engine_failed")


TOOLS = [{"type": "function", "function": {"name": "sh", "parameters": {"type": "object", "properties": {}}}}]


@pytest.mark.parametrize("last", ["ask('PLAY:broken')", "ask('PLAY:long', max_tokens=1)"], ids=["fails", "is cut"])
async def test_a_call_beside_the_agents_own_neither_excuses_nor_masks(tmp_path: Path, last: str) -> None:
    """As of a title; or one that the agent makes with its key, when it knows that it has failed."""
    play = tmp_path / "play.json"
    plays = {
        "turns": [{"text": "I am done with all of it now."}],
        "plays": {"broken": {"turns": [{"text": "x", "fail": 500}]}, "long": {"turns": [{"text": "x " * 50}]}},
    }
    play.write_text(json.dumps(plays))
    engine = {"kind": "scripted", "options": {"play": str(play)}}
    code = f"ask('do the task', tools={TOOLS!r})\ntry: {last}\nexcept urllib.error.HTTPError: pass\nsys.exit(7)"
    async with rollout(tmp_path, engine=engine) as opened:
        finished = await one(opened, task(code, evaluator=GRADED, on_length="mask"))
    assert finished.turns == 2
    assert (finished.verdict.reward, finished.verdict.reason) == (0, None)


async def test_a_reply_that_can_not_be_recorded_is_no_failure_of_the_agents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rollout(tmp_path) as opened:

        async def full(exchange: object) -> None:
            raise StoreError("The disk is full.")

        monkeypatch.setattr(opened.plane.store, "append", full)
        finished = await one(opened, task(ONE_CALL, evaluator=GRADED))
    assert (finished.verdict.reward, finished.verdict.reason) == (None, "engine_failed")


async def test_calls_at_the_same_time_share_what_tokens_are_left(tmp_path: Path) -> None:
    play = tmp_path / "play.json"
    play.write_text(json.dumps({"turns": [{"text": "word " * 400, "token_delay": 0.2}]}))
    engine = {"kind": "scripted", "options": {"play": str(play)}}
    code = (
        "import threading\n"
        "def asks():\n"
        "    try: ask(stream=True)\n"
        "    except ValueError: pass\n"  # the reply is a stream
        "for _ in range(8): threading.Thread(target=asks).start()"
    )
    async with rollout(tmp_path, engine=engine) as opened:
        finished = await one(opened, task(code, budget={"tokens": 100}, on_length="mask", evaluator=GRADED))
    assert finished.verdict.reason == "length"
    assert finished.tokens < 300


async def test_an_agent_that_fails_is_graded(tmp_path: Path) -> None:
    async with rollout(tmp_path) as opened:
        finished = await one(opened, task("ask(); sys.exit(9)", evaluator=GRADED))
    assert (finished.verdict.reward, finished.verdict.reason) == (0, None)
    assert finished.outcome is not None
    assert finished.outcome.exit_code == 9


async def test_a_key_dies_with_its_run(tmp_path: Path) -> None:
    code = "open(os.environ['OUT'], 'w').write(os.environ['OPENAI_API_KEY']); ask()"
    out = tmp_path / "key"
    async with rollout(tmp_path) as opened:
        command = task(code).agent.custom_shell
        assert command is not None
        agent = {"custom_shell": {"command": command.command, "env": {"OUT": str(out)}}}
        await one(opened, task(code, agent=agent))
        assert await opened.plane.sessions.find_by_key(out.read_text()) is None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"agent": {"harness": "nobody"}}, "nobody"),
        ({"agent": {"harness": "shell"}}, "custom_shell.command"),
        ({"agent": {"harness": "codex@0.0.1"}}, "polar harness install codex@0.0.1"),
        ({"evaluator": {"strategy": "nobody"}}, "nobody"),
        ({"evaluator": {"strategy": "command", "config": {"command": "true", "comand": "x"}}}, "comand"),
        ({"runtime": {"backend": "nobody"}}, "nobody"),
        ({"runtime": {"backend": "local", "gpus": 1}}, "gpus"),
        ({"runtime": {"backend": "local", "image": "debian"}}, "image"),
        ({"agent": {"harness": "aider"}}, "polar harness install aider"),
        ({"builder": {"strategy": "nobody"}}, "nobody"),
    ],
)
async def test_a_task_that_cant_be_run_says_why_before_anything_runs(
    tmp_path: Path, fields: dict[str, Any], said: str
) -> None:
    async with rollout(tmp_path, node={"harness_cache": str(tmp_path / "none")}) as opened:
        with pytest.raises(ConfigError, match=said) as raised:
            await opened.plan([task(ONE_CALL, **fields)])
        assert "a-task" in str(raised.value)
        assert await opened.plane.store.list_sessions() == []


async def test_many_at_once(tmp_path: Path) -> None:
    async with rollout(tmp_path, node={"run_workers": 8}) as opened:
        finished = await every(opened, task(ONE_CALL, num_samples=24, evaluator=GRADED))
    assert sorted(one.sample for one in finished) == list(range(24))
    assert {one.verdict.reward for one in finished} == {1}
    assert len({one.session_id for one in finished}) == 24


async def test_a_node_that_is_closed_cancels_what_runs(tmp_path: Path) -> None:
    async with rollout(tmp_path) as opened:
        plan = (await opened.plan([task(FOR_EVER + f" # {tmp_path.name}")]))[0]
        running = [await opened.node.submit(plan, sample) for sample in range(3)]
        await until(lambda: opened.get_load().run == 3)
    assert {one.finished.result().verdict.reason for one in running} == {"cancelled"}
    assert not running_commands(tmp_path.name)


async def test_free_run_slots_are_filled_while_none_has_ended(tmp_path: Path) -> None:
    node = {"init_workers": 1, "ready_buffer": 1, "run_workers": 12}
    async with rollout(tmp_path, node=node) as opened:

        async def read() -> list[FinishedSession]:
            return await every(opened, task(FOR_EVER, num_samples=14))

        reading = asyncio.ensure_future(read())
        await until(lambda: opened.get_load().run == 12)
        opened.cancel()
        finished = await reading
    assert {one.verdict.reason for one in finished} == {"cancelled"}
    assert len(finished) >= 12  # those that had not been taken in never were


async def test_an_engine_that_does_not_answer_is_told_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No engine answers at http://127\.0\.0\.1:9"):
        async with rollout(tmp_path, engine={"kind": "vllm", "urls": ["http://127.0.0.1:9"]}):
            pass
