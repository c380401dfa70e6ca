"""The agent's work in a fresh runtime: exactly that, and the grader's files over it."""

from pathlib import Path
from typing import Any

import pytest

from polar.errors import ConfigError
from polar.evaluators.base import GraderError, UngradableWorkError, parse_config
from polar.evaluators.transfer import workspace
from polar.evaluators.transfer.workspace import TransferConfig
from polar.runtimes.base import Runtime, SandboxError
from polar.testing.grading import AgentWork, WorkFactory

PREPARED = {"old.py": "old", "kept.txt": "kept", "src/a.py": "a", "src/deep/b.py": "b", "tests/t.py": "theirs"}


async def carried(work: AgentWork, **config: Any) -> dict[str, str]:
    runtime = (await workspace.prepare_grading(work, parse_config(TransferConfig, config))).runtime
    return await content(work, runtime)


async def content(work: AgentWork, runtime: Runtime, inside: str = "/workspace") -> dict[str, str]:
    """The text of each file, what else there is as its kind."""
    here = work.scratch / "content"
    await runtime.get(inside, here)
    found = {}
    for path in sorted(here.rglob("*")):
        name = path.relative_to(here).as_posix()
        if path.is_symlink():
            found[name] = f"-> {path.readlink()}"
        elif path.is_file():
            found[name] = path.read_text()
    return found


async def test_by_default_the_workspace_is_the_agents_and_what_it_deleted_is_gone(place: WorkFactory) -> None:
    work = await place.create_work("rm -r old.py src; echo -n new > new.py; ln -s new.py link", files=PREPARED)
    assert await carried(work) == {"kept.txt": "kept", "tests/t.py": "theirs", "new.py": "new", "link": "-> new.py"}


async def test_an_agents_own_runtime_is_left_as_it_was(place: WorkFactory) -> None:
    work = await place.create_work("echo -n new > new.py", files=PREPARED)
    before = await content(work, work.agent_runtime)
    await carried(work, files=[{"type": "upload_file", "target": "new.py", "content": "the grader's"}])
    assert await content(work, work.agent_runtime) == before


async def test_only_what_artifacts_name_is_replaced(place: WorkFactory) -> None:
    agent = "rm src/a.py; echo -n 1 > src/c.py; echo -n no > kept.txt; rm old.py"
    work = await place.create_work(agent, files=PREPARED)
    expected = {**PREPARED, "src/c.py": "1"}
    del expected["src/a.py"]
    assert await carried(work, artifacts=["src"]) == expected


async def test_globs_name_what_the_agent_left_and_what_it_deleted(place: WorkFactory) -> None:
    agent = (
        "rm old.py src/deep/b.py; echo -n 1 > new.py; echo -n 2 > src/deep/n.py; echo no > kept.txt; echo no > x.txt"
    )
    work = await place.create_work(agent, files=PREPARED)
    expected = {"kept.txt": "kept", "new.py": "1", "src/a.py": "a", "src/deep/n.py": "2", "tests/t.py": "theirs"}
    assert await carried(work, artifacts=["**/*.py"]) == expected


async def test_a_globs_wildcards_are_no_shells(place: WorkFactory) -> None:
    work = await place.create_work("""echo -n 1 > '$(touch gotcha).py'; echo -n 2 > '; touch gotcha; .py'""")
    assert await carried(work, artifacts=["*.py"]) == {"$(touch gotcha).py": "1", "; touch gotcha; .py": "2"}


async def test_a_name_with_brackets_is_found(place: WorkFactory) -> None:
    work = await place.create_work("mkdir -p 'app/[id]'; echo -n 1 > 'app/[id]/page'")
    assert await carried(work, artifacts=["app/[id]/page"]) == {"app/[id]/page": "1"}


async def test_a_glob_may_match_nothing(place: WorkFactory) -> None:
    work = await place.create_work("rm -r src", files=PREPARED)
    expected = {name: text for name, text in PREPARED.items() if not name.startswith("src/")}
    assert await carried(work, artifacts=["src/**/*.py"]) == expected


async def test_an_artifact_may_be_outside_of_the_workspace(place: WorkFactory) -> None:
    work = await place.create_work()
    await work.agent_runtime.put(b"made", "/srv/data/result")
    runtime = (await workspace.prepare_grading(work, TransferConfig(artifacts=["/srv/data"]))).runtime
    assert await content(work, runtime, "/srv/data") == {"result": "made"}


@pytest.mark.parametrize(
    ("agent", "artifact"),
    [
        ("true", "result"),
        ("ln -s /etc/passwd result", "result"),
        ("mkfifo result", "result"),
        ("touch folder", "folder/result"),
        ("ln -s a b; ln -s b a", "a/result"),
        ("head -c 2000000 /dev/zero > result", "result"),
        ("truncate -s 1T result", "result"),
        ("mkdir many; cd many; seq 4000 | xargs touch", "many"),
    ],
)
async def test_what_the_agent_made_impossible_to_take_is_its_own_doing(
    place: WorkFactory, agent: str, artifact: str
) -> None:
    work = await place.create_work(agent)
    with pytest.raises(UngradableWorkError, match=artifact.split("/")[0]):
        await carried(work, artifacts=[artifact], max_mb=1)


async def test_folders_too_deep_for_this_machine_are_the_agents_doing(place: WorkFactory) -> None:
    deep = "import os; [(os.mkdir('d' * 200), os.chdir('d' * 200)) for _ in range(40)]"
    work = await place.create_work(f'python3 -c "{deep}"')
    with pytest.raises(UngradableWorkError):
        await carried(work)


async def test_a_workspace_that_was_too_large_before_is_not(place: WorkFactory) -> None:
    prepare = {"prepare": [{"type": "exec", "command": "head -c 2000000 /dev/zero > large"}]}
    work = await place.create_work("touch new", runtime=prepare)
    with pytest.raises(GraderError, match="max_mb"):
        await carried(work, max_mb=1)


async def test_a_runtime_that_is_not_there_is_the_platforms_failure(place: WorkFactory) -> None:
    work = await place.create_work()
    await work.agent_runtime.remove()
    with pytest.raises(SandboxError):
        await carried(work)


GRADERS = {"type": "upload_file", "target": "tests/hidden/t.py", "content": "the grader's"}


@pytest.mark.parametrize(
    "agent",
    [
        "rm -r tests; ln -s src tests",
        "rm -r tests; ln -s nowhere tests",
        "ln -s ../src tests/hidden",
        "rm -r tests; touch tests",
        "mkdir -p tests/hidden/t.py/inner",
        "mkdir tests/hidden; ln -s ../../src/a.py tests/hidden/t.py",
        "mkdir tests/hidden; echo own > tests/hidden/t.py; chmod 400 tests/hidden/t.py",
    ],
)
@pytest.mark.parametrize("live", [False, True])
async def test_nothing_redirects_a_graders_file(place: WorkFactory, agent: str, live: bool) -> None:
    work = await place.create_work(agent, files=PREPARED, evaluator={"refresh_runtime": not live})
    found = await carried(work, files=[GRADERS])
    assert found["tests/hidden/t.py"] == "the grader's"
    assert found["src/a.py"] == "a"
    assert [name for name in found if name.startswith("src/")] == ["src/a.py", "src/deep/b.py"]


async def test_a_graders_folder_holds_nothing_of_the_agents(place: WorkFactory, tmp_path: Path) -> None:
    (tmp_path / "graders").mkdir()
    (tmp_path / "graders" / "t.py").write_text("the grader's")
    work = await place.create_work("echo 1 > tests/conftest.py; echo 1 > conftest.py", files=PREPARED)
    upload = {"type": "upload_dir", "source": str(tmp_path / "graders"), "target": "tests"}
    found = await carried(work, files=[upload])
    assert {name: text for name, text in found.items() if name.startswith("tests/")} == {"tests/t.py": "the grader's"}
    into_all = await carried(work, files=[{**upload, "target": "."}])
    assert into_all["t.py"] == "the grader's"
    assert into_all["tests/conftest.py"] == "1\n"


async def test_a_graders_file_that_is_not_there_is_the_tasks_fault(place: WorkFactory, tmp_path: Path) -> None:
    work = await place.create_work()
    with pytest.raises(GraderError, match="nowhere"):
        await carried(work, files=[{"type": "upload_file", "source": str(tmp_path / "nowhere"), "target": "x"}])


async def test_links_that_lead_elsewhere_are_carried_and_not_followed(place: WorkFactory, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hunter2")
    prepare = [{"type": "exec", "command": "ln -s /usr/bin/env theirs"}]
    work = await place.create_work(
        f"ln -s {tmp_path}/secret out; ln -s {tmp_path} folder", runtime={"prepare": prepare}
    )
    taken = await workspace.collect_artifacts(work, TransferConfig())
    assert {path.name for path in taken.scratch.rglob("*") if path.is_symlink()} == {"theirs", "out", "folder"}
    fresh = await work.create_fresh_runtime()
    await taken.put_into(fresh)
    ran = await fresh.run(["sh", "-c", "readlink theirs out folder && ./theirs true"], output=work.logs / "log")
    assert ran.exit_code == 0
    assert (work.logs / "log").read_text().splitlines() == ["/usr/bin/env", f"{tmp_path}/secret", str(tmp_path)]
    globbed = await workspace.collect_artifacts(work, TransferConfig(artifacts=["*", "folder/*"]))
    assert globbed.copies == []


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"artifacts": ["../x"]}, "config.artifacts.0"),
        ({"artifacts": [""]}, "config.artifacts.0"),
        ({"files": [{"type": "exec", "command": "x"}]}, "config.files.0"),
        ({"files": [{"type": "upload_file", "target": "x"}]}, "config.files.0"),
        ({"max_mb": 0}, "config.max_mb"),
        ({"max": 1}, "config.max"),
    ],
)
def test_what_cant_be_used_names_its_field(config: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{field}\b"):
        parse_config(TransferConfig, config)


async def test_names_that_the_graders_search_paths_would_find_first_are_not_laid(place: WorkFactory) -> None:
    agent = (
        "mkdir -p src/json bin; touch src/subprocess.py src/json/__init__.py src/mine.py bin/grep bin/mine tarfile.py"
    )
    work = await place.create_work(agent, files={"src/calc.py": "", "src/csv.py": ""})
    env = {"PATH": "bin:/usr/bin:/bin", "PYTHONPATH": "src"}
    runtime = (await workspace.prepare_grading(work, TransferConfig(), env)).runtime
    assert set(await content(work, runtime)) == {"src/calc.py", "src/csv.py", "src/mine.py", "bin/mine", "tarfile.py"}


async def test_a_folder_of_the_search_path_is_no_link_of_the_agents(place: WorkFactory) -> None:
    work = await place.create_work("mkdir tools; touch tools/grep; ln -s tools bin; ln -s tools other")
    runtime = (await workspace.prepare_grading(work, TransferConfig(), {"PATH": "bin:/usr/bin:/bin"})).runtime
    assert set(await content(work, runtime)) == {"tools/grep", "other"}


async def test_a_changed_program_with_the_name_of_another_one_is_not_laid(place: WorkFactory) -> None:
    work = await place.create_work("echo changed > bin/grep", files={"bin/grep": "a", "bin/sed": "b"})
    runtime = (await workspace.prepare_grading(work, TransferConfig(), {"PATH": "bin:/usr/bin:/bin"})).runtime
    assert await content(work, runtime) == {"bin/sed": "b"}


async def test_a_package_with_the_name_of_the_graders_module_is_not_laid(place: WorkFactory) -> None:
    grader = {"type": "upload_file", "target": "rows.py", "content": "the grader's"}
    work = await place.create_work("mkdir rows data; touch rows/__init__.py rows.so data/__init__.py")
    assert await carried(work, files=[grader]) == {"rows.py": "the grader's", "data/__init__.py": ""}


async def test_a_module_that_the_instruction_names_is_laid(place: WorkFactory) -> None:
    work = await place.create_work("mkdir src; touch src/queue.py", instruction="Write src/queue.py.")
    runtime = (await workspace.prepare_grading(work, TransferConfig(), {"PYTHONPATH": "src"})).runtime
    assert set(await content(work, runtime)) == {"src/queue.py"}


@pytest.mark.runtimes
@pytest.mark.parametrize("disk_mb", [None, 64])
async def test_a_sandbox_keeps_to_it_as_well(sandbox: WorkFactory, disk_mb: int | None) -> None:
    agent = "rm -r old.py tests; ln -s /etc tests; echo -n new > new.py; echo -n x > /tmp/outside"
    work = await sandbox.create_work(agent, files=PREPARED, runtime={"backend": "bubblewrap", "disk_mb": disk_mb})
    runtime = (await workspace.prepare_grading(work, parse_config(TransferConfig, {"files": [GRADERS]}))).runtime
    found = await content(work, runtime)
    assert found == {
        "kept.txt": "kept",
        "new.py": "new",
        "src/a.py": "a",
        "src/deep/b.py": "b",
        "tests/hidden/t.py": "the grader's",
    }
    assert (await runtime.run(["test", "-e", "/tmp/outside"])).exit_code == 1


@pytest.mark.runtimes
async def test_a_disk_that_the_agent_filled_is_its_own_doing(sandbox: WorkFactory) -> None:
    limits = {"backend": "bubblewrap", "disk_mb": 32}
    upload = {"type": "upload_file", "target": "/grader", "content": "x" * 1_000_000}
    work = await sandbox.create_work("cat /dev/zero > full 2>/dev/null; true", runtime=limits)
    with pytest.raises(UngradableWorkError, match="disk"):
        await carried(work, files=[upload])
