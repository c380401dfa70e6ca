"""`command`: the exit status, the reward file, or what was printed; and what agents try against it."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.errors import ConfigError
from polar.evaluators.base import GraderError
from polar.evaluators.command import Command, parse_number
from polar.records.session import Verdict
from polar.runtimes.base import SandboxError
from polar.testing.grading import AgentWork, WorkFactory


async def verdict(work: AgentWork, command: str | list[str], **config: Any) -> Verdict:
    return await Command({"command": command, **config}).evaluate(work)


async def test_the_exit_status_is_the_reward(place: WorkFactory) -> None:
    work = await place.create_work("echo 42 > answer")
    assert (await verdict(work, "grep -q 42 answer")).reward == 1.0
    wrong = await verdict(work, "grep -q 43 answer")
    assert wrong.reward == 0.0
    assert wrong.detail["exit_code"] == 1
    assert (await verdict(work, ["grep", "-q", "42", "answer"])).reward == 1.0


async def test_the_commands_output_folder_and_environment(place: WorkFactory) -> None:
    work = await place.create_work("mkdir sub", evaluator={"env": {"A": "the evaluator's", "B": "the evaluator's"}})
    await verdict(work, 'echo "$A, $B, ${PWD##*/}" ', cwd="sub", env={"B": "the config's"})
    assert (work.logs / "evaluator.log").read_text() == "the evaluator's, the config's, sub\n"


async def test_each_evaluation_is_in_a_fresh_runtime(place: WorkFactory) -> None:
    work = await place.create_work()
    for _ in range(2):
        assert (await verdict(work, "test ! -e mark && touch mark")).reward == 1.0


@pytest.mark.parametrize(("written", "reward"), [("0.25", 0.25), (" -3\n", -3.0), ("1e-3", 0.001)])
async def test_a_reward_file_holds_the_reward(place: WorkFactory, written: str, reward: float) -> None:
    work = await place.create_work()
    found = await verdict(work, f"printf '{written}' > logs/reward; exit 3", reward_file="logs/reward")
    assert found.reward == reward


@pytest.mark.parametrize("written", ["", "nan", "inf", "-Infinity", "one", "1 2", "1e999", "{}", "0x1", "\\377"])
async def test_a_failed_command_without_a_number_is_0_and_one_that_ends_well_is_the_tasks_fault(
    place: WorkFactory, written: str
) -> None:
    work = await place.create_work()
    failed = await verdict(work, f"printf %b '{written}' > reward; exit 1", reward_file="reward")
    assert failed.reward == 0.0
    assert "no number" in failed.detail["why"]
    with pytest.raises(GraderError, match="reward_file"):
        await verdict(work, f"printf %b '{written}' > reward", reward_file="reward")


@pytest.mark.parametrize(
    "agent",
    [
        "echo 1 > reward",
        "echo 1 > planted; ln -s planted reward",
        "mkdir reward; echo 1 > reward/reward",
        "echo 1 > reward; chmod 444 reward",
        "mkdir -p real; echo 1 > real/reward; ln -s real logs",
    ],
)
@pytest.mark.parametrize("reward_file", ["reward", "logs/reward"])
async def test_a_planted_reward_file_is_gone(place: WorkFactory, agent: str, reward_file: str) -> None:
    work = await place.create_work(agent)
    assert (await verdict(work, "exit 1", reward_file=reward_file)).reward == 0.0
    written = await verdict(work, f"echo 0.5 > {reward_file}", reward_file=reward_file)
    assert written.reward == 0.5


async def test_when_the_reward_is_read_nothing_inside_can_write_it_any_more(place: WorkFactory) -> None:
    work = await place.create_work("echo '(while :; do echo 1 > reward; done) >/dev/null 2>&1 &' > solution.sh")
    await verdict(work, "sh solution.sh; exit 1", reward_file="reward")
    [runtime] = work.fresh_runtimes
    await runtime.put(b"mark", "/workspace/reward")
    for _ in range(50):
        await runtime.get("/workspace/reward", work.scratch / "reward")
        assert (work.scratch / "reward").read_bytes() == b"mark"


async def test_code_that_ends_the_grader_early_excuses_nothing(place: WorkFactory) -> None:
    """The grader imports the agent's module, which ends the process: no number, and status 0."""
    grader = "import solution\nopen('reward', 'w').write('0.0')\n"
    prepared = {"solution.py": ""}
    config = {"reward_file": "reward", "files": [{"type": "upload_file", "target": "check.py", "content": grader}]}
    work = await place.create_work("echo 'import os; os._exit(0)' > solution.py", files=prepared)
    found = await verdict(work, "python3 check.py", **config)
    assert (found.reward, found.reason) == (0.0, None)


async def test_a_program_that_is_nowhere_is_the_tasks_fault_but_not_one_that_the_agent_should_have_made(
    place: WorkFactory,
) -> None:
    work = await place.create_work()
    for command in ("no-such-program --now", ["no-such-program"]):
        with pytest.raises(GraderError, match="no-such-program"):
            await verdict(work, command)
    assert (await verdict(work, "./solution")).reward == 0.0
    assert (await verdict(work, ["./solution"])).reward == 0.0
    assert (await verdict(work, "true; exit 127")).reward == 0.0
    assert (await verdict(work, "made", env={"PATH": "/workspace/bin:/bin:/usr/bin"})).reward == 0.0


async def test_evidence_counts_also_where_the_sandbox_fails_afterwards(
    place: WorkFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any) -> None:
        raise SandboxError("The machine is gone.")

    monkeypatch.setattr(Command, "_run", fail)
    work = await place.create_work("mkdir .grader; touch .grader/csv.py")
    with pytest.raises(SandboxError):
        await verdict(work, "true", files=[{"type": "upload_file", "target": ".grader/check.py", "content": ""}])
    assert [(found.kind, found.proven) for found in work.evidence] == [("grader_path", True)]


async def test_an_endless_loop_is_the_agents_own_doing(place: WorkFactory) -> None:
    work = await place.create_work("echo 'while :; do :; done' > solution.sh")
    found = await verdict(work, "echo 1 > reward; sh solution.sh", reward_file="reward", timeout_seconds=0.3)
    assert found.reward == 0.0
    assert "too long" in found.detail["why"]


async def test_what_cant_be_taken_is_0(place: WorkFactory) -> None:
    work = await place.create_work()
    found = await verdict(work, "true", artifacts=["result"])
    assert found.reward == 0.0
    assert "result" in found.detail["why"]


async def test_the_agents_own_runtime_goes_on_running_where_the_task_asks_for_it(place: WorkFactory) -> None:
    work = await place.create_work("echo 1 > elsewhere", evaluator={"refresh_runtime": False})
    assert (await verdict(work, "cat elsewhere > reward", reward_file="reward")).reward == 1.0
    assert (await work.agent_runtime.run(["true"])).exit_code == 0
    assert (await verdict(work, "true", reward_file="reward")).reward == 0.0


async def test_expected_outcomes_must_all_be_printed(place: WorkFactory) -> None:
    work = await place.create_work()
    printed = "echo 'PASSED test_a.py::C::test_x'; echo 'FAILED test_a.py::test_y - assert 1'; echo 'PASSED plain'"
    good = {"C.test_x": "PASSED", "test_y": "FAILED", "test_a.py::test_y": "FAILED", "plain": "PASSED"}
    assert (await Command({"test_command": printed, "expected_output_json": good}).evaluate(work)).reward == 1.0
    assert (await verdict(work, printed, expected_output_json='{"plain": "FAILED"}')).reward == 0.0
    assert (await verdict(work, printed, expected_output_json={"absent": "PASSED"})).reward == 0.0
    assert (
        await verdict(work, f"{printed}; echo 'FAILED plain'", expected_output_json={"plain": "PASSED"})
    ).reward == 0


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({}, "config.command"),
        ({"command": ""}, "config.command"),
        ({"command": []}, "config.command"),
        ({"command": "x", "reward_file": "../x"}, "config.reward_file"),
        ({"command": "x", "timeout_seconds": 0}, "config.timeout_seconds"),
        ({"command": "x", "reward": "x"}, "config.reward"),
        ({"command": "x", "expected_output_json": "{"}, "config.expected_output_json"),
        ({"command": "x", "expected_output_json": {}, "reward_file": "x"}, "config"),
    ],
)
def test_a_config_that_cant_be_used_names_the_field(config: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{field}\b"):
        Command(config)


@pytest.mark.runtimes
async def test_memory_that_the_agents_code_eats_is_its_own_doing(sandbox: WorkFactory) -> None:
    limits = {"backend": "bubblewrap", "memory_mb": 64}
    work = await sandbox.create_work("echo 'x = bytearray(10**9)' > solution.py", runtime=limits)
    found = await verdict(work, "echo 1 > /tmp/reward; exec python3 solution.py", reward_file="/tmp/reward")
    assert found.reward == 0.0
    assert "memory" in found.detail["why"]


@pytest.mark.runtimes
async def test_a_daemon_of_the_graders_run_is_dead_when_the_reward_is_read(sandbox: WorkFactory) -> None:
    work = await sandbox.create_work(runtime={"backend": "bubblewrap"})
    daemon = "setsid sh -c 'while :; do echo 1 > /tmp/reward; done' >/dev/null 2>&1 &"
    assert (await verdict(work, f"{daemon} exit 1")).reward == 0.0
    [runtime] = work.fresh_runtimes
    await runtime.put(b"mark", "/tmp/reward")
    for _ in range(50):
        await runtime.get("/tmp/reward", work.scratch / "reward")
        assert (work.scratch / "reward").read_bytes() == b"mark"


@given(
    st.one_of(st.text(max_size=20), st.floats().map(repr), st.sampled_from(["1_0", "٣", "+.5e-3", "infinity", "1e400"]))
)
def test_whatever_is_in_the_file_the_reward_is_finite(text: str) -> None:
    found = parse_number(text)
    assert found is None or math.isfinite(found)
