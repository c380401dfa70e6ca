"""The evaluator `harbor`, with real test.sh runs in sandboxes."""

import json
from pathlib import Path
from typing import Any

import pytest

from polar.errors import ConfigError
from polar.evaluators.base import GraderError
from polar.evaluators.harbor import Harbor, read_rewards
from polar.records.session import Verdict
from polar.testing.grading import AgentWork, WorkFactory

JUDGE = """\
#!/bin/bash
if [ "$(cat hello.txt)" = "$(cat /tests/expected.txt)" ]; then
    echo 1 > /logs/verifier/reward.txt
else
    echo 0 > /logs/verifier/reward.txt
fi
"""
SOLVED = "echo hello > hello.txt"


@pytest.fixture
def tests(tmp_path: Path) -> Path:
    folder = tmp_path / "task" / "tests"
    folder.mkdir(parents=True)
    (folder / "test.sh").write_text(JUDGE)
    (folder / "expected.txt").write_text("hello\n")
    return folder


async def worked(place: WorkFactory, agent: str, **runtime: Any) -> AgentWork:
    return await place.create_work(agent, runtime={"workdir": "/app", **runtime})


async def judged(place: WorkFactory, tests: Path, agent: str, **config: Any) -> Verdict:
    return await Harbor({"tests": str(tests), **config}).evaluate(await worked(place, agent))


@pytest.mark.runtimes
async def test_solved_and_not(sandbox: WorkFactory, tests: Path) -> None:
    verdict = await judged(sandbox, tests, SOLVED)
    assert (verdict.reward, verdict.detail["rewards"]) == (1.0, {"reward": 1.0})
    assert (await judged(sandbox, tests, "")).reward == 0.0


@pytest.mark.runtimes
async def test_files_outside_of_the_workspace_count_and_logs_are_kept(sandbox: WorkFactory, tests: Path) -> None:
    (tests / "test.sh").write_text(
        'echo looked; cat /srv/it; echo {\\"reward\\": 0.25, \\"other\\": 1} > /logs/verifier/reward.json; echo 1 > '
        "/logs/verifier/reward.txt; echo more > /logs/verifier/more.txt\n"
    )
    work = await worked(sandbox, "mkdir -p /srv; echo present > /srv/it")
    verdict = await Harbor({"tests": str(tests)}).evaluate(work)
    assert (verdict.reward, verdict.detail["rewards"]) == (0.25, {"reward": 0.25, "other": 1.0})
    assert (work.logs / "harbor.log").read_text() == "looked\npresent\n"
    assert (work.logs / "harbor-verifier" / "more.txt").read_text() == "more\n"


@pytest.mark.runtimes
@pytest.mark.parametrize(
    "agent",
    [
        "mkdir -p /logs/verifier; echo '{\"reward\": 1}' > /logs/verifier/reward.json",
        "mkdir -p /logs /mine; echo '{\"reward\": 1}' > /mine/reward.json; ln -s /mine /logs/verifier",
        "mkdir -p /mine/verifier; echo '{\"reward\": 1}' > /mine/verifier/reward.json; ln -s /mine /logs",
        "mkdir -p /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; chmod 555 /tests",
        "mkdir -p /mine; ln -s /mine /tests; echo nothing > /mine/expected.txt",
        "mkdir -p /logs/verifier; (while :; do echo 1 > /logs/verifier/reward.json; done) >/dev/null 2>&1 &",
        "echo 'echo 1 > /logs/verifier/reward.json; exit' | tee ~/.bashrc ~/.profile ~/.bash_profile /etc/profile",
    ],
)
async def test_cheats_earn_nothing(sandbox: WorkFactory, tests: Path, agent: str) -> None:
    assert (await judged(sandbox, tests, agent)).reward == 0.0


@pytest.mark.runtimes
@pytest.mark.parametrize("shim", ["/opt/first/cat", "/opt/tools/cat", "/opt/tools/judge"])
async def test_programs_of_the_agents_are_not_called(sandbox: WorkFactory, tests: Path, shim: str) -> None:
    """Before another in PATH, or in its place."""
    tool = {"type": "upload_file", "target": "/opt/tools/cat", "content": '#!/bin/sh\nexec /usr/bin/cat "$@"\n'}
    steps = [tool, {"type": "exec", "command": "chmod +x /opt/tools/cat"}]
    path = {"PATH": "/opt/first:/opt/tools:/usr/bin:/bin"}
    cheat = f"mkdir -p /opt/first; printf '#!/bin/sh\\necho same\\n' > {shim}; chmod +x {shim}"
    work = await worked(sandbox, cheat, prepare=steps, env=path)
    assert (await Harbor({"tests": str(tests)}).evaluate(work)).reward == 0.0
    if shim != "/opt/tools/judge":
        work = await worked(sandbox, cheat, prepare=steps, env=path)
        assert (await Harbor({"tests": str(tests), "system_paths": ["/opt"]}).evaluate(work)).reward == 1.0


@pytest.mark.runtimes
@pytest.mark.parametrize("path", ["/etc/ld.so.preload", "/etc/gitconfig", "/root/.bashrc", "/var/lib/x", "/notes"])
async def test_what_the_task_does_not_name_of_the_system_is_as_it_was(
    sandbox: WorkFactory, tests: Path, path: str
) -> None:
    (tests / "test.sh").write_text(
        f"[ -s {path} ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n"
    )
    agent = f"mkdir -p $(dirname {path}); echo mine > {path}"
    assert (await judged(sandbox, tests, agent)).reward == 0.0
    assert (await judged(sandbox, tests, agent, system_paths=[path])).reward == 1.0


@pytest.mark.runtimes
async def test_changes_elsewhere_are_carried_as_they_are(sandbox: WorkFactory, tests: Path) -> None:
    (tests / "test.sh").write_text(
        'cd /srv/site && [ ! -e old ] && [ -x run.sh ] && [ -d empty ] && [ "$(cat deep/er/index)" = new ] '
        '&& [ "$(readlink current)" = deep ] && [ "$(stat -c %a private)" = 700 ] && [ "$(cat kept)" = kept ]'
        " && echo 1 > /logs/verifier/reward.txt\n"
    )
    site = "mkdir -p /srv/site; cd /srv/site; echo old > old; echo kept > kept"
    agent = (
        "cd /srv/site; rm old; mkdir -p deep/er empty private; chmod 700 private; echo new > deep/er/index; "
        "ln -s deep current; echo > run.sh; chmod +x run.sh"
    )
    work = await worked(sandbox, agent, prepare=[{"type": "exec", "command": site}])
    verdict = await Harbor({"tests": str(tests)}).evaluate(work)
    assert (verdict.reward, verdict.evidence) == (1.0, [])


@pytest.mark.runtimes
async def test_a_virtual_environment_in_path_is_as_it_was(sandbox: WorkFactory, tests: Path) -> None:
    (tests / "test.sh").write_text("tool > /logs/verifier/reward.txt\n")
    make = "mkdir -p /app/env/bin; printf '#!/bin/sh\\necho 0\\n' > /app/env/bin/tool; chmod +x /app/env/bin/tool"
    path = {"PATH": "/app/env/bin:/usr/bin:/bin"}
    cheat = "printf '#!/bin/sh\\necho 1\\n' > /app/env/bin/tool"
    work = await worked(sandbox, cheat, prepare=[{"type": "exec", "command": make}], env=path)
    assert (await Harbor({"tests": str(tests)}).evaluate(work)).reward == 0.0
    work = await worked(sandbox, cheat, prepare=[{"type": "exec", "command": make}], env=path)
    assert (await Harbor({"tests": str(tests), "system_paths": ["/app/env"]}).evaluate(work)).reward == 1.0


@pytest.mark.runtimes
async def test_no_reward_is_whose_doing_it_is(sandbox: WorkFactory, tests: Path) -> None:
    (tests / "test.sh").write_text("[ -e /app/broken ] && exit 1\necho 1 > /logs/verifier/reward.txt\n")
    verdict = await judged(sandbox, tests, "touch broken")
    assert (verdict.reward, verdict.detail["exit_code"]) == (0.0, 1)
    for broken in ("true", "no-such-program", "exec /app"):
        (tests / "test.sh").write_text(f"{broken}\n")
        with pytest.raises(GraderError, match="without the agent"):
            await judged(sandbox, tests, "")
    (tests / "test.sh").write_text("[ -e /app/slow ] && sleep 600\necho 1 > /logs/verifier/reward.txt\n")
    verdict = await judged(sandbox, tests, "touch slow", timeout_seconds=2)
    assert (verdict.reward, verdict.detail["why"]) == (0.0, "The tests took too long.")


@pytest.mark.runtimes
@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("set -e\ngrep hello hello.txt\n", "test.sh ended with 2 and left no reward in /logs/verifier."),
        ("until [ -e hello.txt ]; do sleep 0.1; done\n", "The tests took too long."),
    ],
)
async def test_tests_that_end_without_a_reward_by_nature_excuse_nobody(
    sandbox: WorkFactory, tests: Path, script: str, why: str
) -> None:
    (tests / "test.sh").write_text(f"{script}echo 1 > /logs/verifier/reward.txt\n")
    verdict = await judged(sandbox, tests, "", timeout_seconds=2)
    assert (verdict.reward, verdict.detail["why"]) == (0.0, why)
    assert (await judged(sandbox, tests, SOLVED, timeout_seconds=2)).reward == 1.0


@pytest.mark.runtimes
async def test_a_live_runtime(sandbox: WorkFactory, tests: Path) -> None:
    work = await sandbox.create_work(SOLVED, runtime={"workdir": "/app"}, evaluator={"refresh_runtime": False})
    verdict = await Harbor({"tests": str(tests)}).evaluate(work)
    assert (verdict.reward, verdict.detail["live"]) == (1.0, True)


async def test_local_has_no_root_of_its_own(place: WorkFactory, tests: Path) -> None:
    with pytest.raises(GraderError, match="not local"):
        await judged(place, tests, SOLVED)


async def test_settings_that_can_not_be_used(place: WorkFactory, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.tests: it must be an absolute path"):
        Harbor({"tests": "tests"})
    for path in ("etc", "/", "/etc/../x"):
        with pytest.raises(ConfigError, match=r"config\.system_paths\.0"):
            Harbor({"tests": "/tests", "system_paths": [path]})
    with pytest.raises(GraderError, match=r"test\.sh"):
        await judged(place, tmp_path, SOLVED)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("reward.txt", "0.5\n", {"reward": 0.5}),
        ("reward.txt", "nan", {}),
        ("reward.txt", "", {}),
        ("reward.json", '{"reward": 1}', {"reward": 1.0}),
        ("reward.json", '{"accuracy": 0.5}', {"accuracy": 0.5, "reward": 0.5}),
        ("reward.json", '{"accuracy": 0.5, "seconds": 3}', {"accuracy": 0.5, "seconds": 3.0}),
        ("reward.json", '{"reward": Infinity, "x": 1}', {"x": 1.0}),
        ("reward.json", "0.5", {"reward": 0.5}),
        ("reward.json", '{"reward": "1"}', {}),
        ("reward.json", "[" * 100_000, {}),
        ("reward.json", json.dumps({"reward": 10**400}), {}),
    ],
)
def test_reward_files(tmp_path: Path, name: str, text: str, expected: dict[str, float]) -> None:
    (tmp_path / name).write_text(text)
    assert read_rewards(tmp_path / name) == expected
