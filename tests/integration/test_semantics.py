"""What a task means on NVIDIA's Polar, done by a real node; and what its agents find in their environment."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from polar.gateway.meter import Meter
from polar.node.finished_session import FinishedSession
from polar.records.result import SessionResult
from tests.integration.agents import task
from tests.integration.test_node import FOR_EVER, GRADED, ONE_CALL, one, rollout, until

NVIDIA = {"semantics": "nvidia"}


async def finished(tmp_path: Path, code: str = ONE_CALL, **fields: Any) -> FinishedSession:
    async with rollout(tmp_path) as opened:
        return await one(opened, task(code, **{"evaluator": GRADED} | fields))


@pytest.mark.parametrize(
    ("semantics", "reward", "reason"), [({}, 1.0, None), (NVIDIA, None, "nonzero_exit")], ids=["polar", "nvidia"]
)
async def test_a_harness_that_exits_non_zero(
    tmp_path: Path, semantics: dict[str, Any], reward: float | None, reason: str | None
) -> None:
    evaluator = {"strategy": "command", "config": {"command": "test -f done"}}
    ended = await finished(tmp_path, "ask(); open('done', 'w'); sys.exit(3)", evaluator=evaluator, **semantics)
    assert (ended.verdict.reward, ended.verdict.reason) == (reward, reason)
    assert ended.error == (None if reason is None else "The harness ended with 3.")


async def test_a_time_out_has_no_reward(tmp_path: Path) -> None:
    ended = await finished(tmp_path, FOR_EVER, timeout_seconds=2, **NVIDIA)
    assert (ended.verdict.reward, ended.verdict.reason) == (None, "timeout")


@pytest.mark.parametrize(
    ("semantics", "reward", "reason"), [({}, 0.0, None), (NVIDIA, None, "timeout_grading")], ids=["polar", "nvidia"]
)
async def test_a_grader_that_runs_out_of_its_own_time(
    tmp_path: Path, semantics: dict[str, Any], reward: float | None, reason: str | None
) -> None:
    evaluator = {"strategy": "command", "config": {"command": "sleep 600", "timeout_seconds": 0.5}}
    ended = await finished(tmp_path, evaluator=evaluator, **semantics)
    assert (ended.verdict.reward, ended.verdict.reason) == (reward, reason)


@pytest.mark.parametrize(
    ("stage", "turns", "error"),
    [
        ("init", 0, "The runtime was not ready within 60 seconds."),
        ("postrun", 1, "The session was not graded within 60 seconds."),
    ],
)
async def test_the_clock_covers_everything_from_init_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, turns: int, error: str
) -> None:
    over = asyncio.Event()

    async def time_over(_: Meter, __: float) -> None:
        await over.wait()

    monkeypatch.setattr(Meter, "wait_for_timeout", time_over)
    slow = {"backend": "local", "prepare": [{"type": "exec", "command": "sleep 600"}] if stage == "init" else []}
    evaluator = {"strategy": "command", "config": {"command": "sleep 600"}}
    async with rollout(tmp_path) as opened:
        (plan,) = await opened.plan([task(ONE_CALL, timeout_seconds=60, runtime=slow, evaluator=evaluator, **NVIDIA)])
        running = await opened.node.submit(plan)
        await until(lambda: running.stage == stage)
        over.set()
        ended = await running.finished
    assert (ended.verdict.reason, ended.turns, ended.error) == ("timeout", turns, error)


@pytest.mark.parametrize(("semantics", "found"), [({}, "ab"), (NVIDIA, "b")], ids=["polar", "nvidia"])
async def test_what_the_evaluators_runtime_is_prepared_with(
    tmp_path: Path, semantics: dict[str, Any], found: str
) -> None:
    runtime = {
        "backend": "local",
        "prepare": [{"type": "exec", "command": "printf a >> made"}],
        "eval_prepare": [{"type": "exec", "command": "printf b >> made"}],
    }
    command = f'test "$(cat made)" = {found}'
    evaluator = {"strategy": "command", "config": {"command": command, "artifacts": ["answer"]}}
    ended = await finished(tmp_path, "open('answer', 'w'); ask()", runtime=runtime, evaluator=evaluator, **semantics)
    assert ended.verdict.reward == 1.0, ended.verdict


async def test_a_step_is_tried_again(tmp_path: Path) -> None:
    step = {"type": "exec", "command": "echo x >> tries; test $(wc -l < tries) = 3", "retry_backoff_seconds": 0.01}
    for attempts, reason in ((3, None), (2, "prepare_failed")):
        runtime = {"backend": "local", "prepare": [step | {"max_attempts": attempts}]}
        ended = await finished(tmp_path / str(attempts), runtime=runtime)
        assert ended.verdict.reason == reason


async def test_an_agent_finds_its_session_in_the_environment(tmp_path: Path) -> None:
    code = """
names = ("SESSION_DIR", "ARTIFACTS_DIR", "LOGS_DIR", "AGENT_LOG_DIR")
for name in names:
    open(os.path.join(os.environ[name], "mine.txt"), "w").write("x")
assert os.environ["GOOGLE_API_URL"] and os.environ["TASK_ID"] == "a-task"
assert os.environ["SESSION_ID"] not in (os.environ["OPENAI_API_KEY"], "")
ask(os.environ["SESSION_ID"])
"""
    async with rollout(tmp_path) as opened:
        plans = await opened.plan([task(code, evaluator=GRADED)])
        (ended,) = [one async for one in opened.run(plans)]
        result = SessionResult.model_validate(await opened.build_result(plans[0], ended))
    assert ended.outcome is not None
    assert ended.outcome.exit_code == 0, (ended.folder / "agent.log").read_text()
    assert result.trajectory.traces[0].prompt_messages[-1]["content"] == ended.session_id
