"""The evaluator `tests`: real runs of pytest, over what honest and other agents left."""

import hashlib
import hmac
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polar.errors import ConfigError
from polar.evaluators import project_tests as evaluator
from polar.evaluators import results, signed_run
from polar.evaluators.base import GraderError
from polar.evaluators.changes import FileChange, FolderEntry
from polar.evaluators.results import BrokenResultsError, CaseResult, RunResults
from polar.evaluators.transfer.protected_files import ProtectedFiles, ProtectionConfig
from polar.records.session import Verdict
from polar.testing.grading import WITH_PLUGINS, WITHOUT_PLUGINS, WorkFactory
from tests.selection import leave_to_slow

PYTEST = f"{sys.executable} -m pytest"
FILES = {
    "calc.py": "def add(a, b):\n    return a - b\n\n\ndef same(a):\n    return a\n",
    "tests/test_calc.py": (
        "import calc\n\n\ndef test_add():\n    assert calc.add(1, 2) == 3\n\n\n"
        "def test_same():\n    assert calc.same(1) == 1\n"
    ),
    "pytest.ini": "[pytest]\n",
}
ADD, SAME = "tests/test_calc.py::test_add", "tests/test_calc.py::test_same"
NAMED = {"must_pass": [ADD], "must_keep": [SAME]}
FIX = "sed -i 's/a - b/a + b/' calc.py"


async def judged(place: WorkFactory, agent: str, files: dict[str, str] | None = None, **config: Any) -> Verdict:
    work = await place.create_work(agent, files={**FILES, **(files or {})})
    return await evaluator.ProjectTests({"command": PYTEST, **NAMED, **config}).evaluate(work)


async def test_honest_success(place: WorkFactory) -> None:
    verdict = await judged(place, FIX)
    assert verdict.reward == 1.0
    assert verdict.detail == {"dropped": [], "must_pass_failed": [], "must_keep_failed": []}


async def test_honest_failure(place: WorkFactory) -> None:
    verdict = await judged(place, "")
    assert (verdict.reward, verdict.detail["must_pass_failed"]) == (0.0, [ADD])


async def test_what_worked_must_keep_working(place: WorkFactory) -> None:
    verdict = await judged(place, f"{FIX}; sed -i 's/return a$/return 2/' calc.py")
    assert (verdict.reward, verdict.detail["must_keep_failed"]) == (0.0, [SAME])


async def test_partial(place: WorkFactory) -> None:
    both = {"must_pass": [ADD, SAME], "must_keep": [], "partial": True}
    assert (await judged(place, "", **both)).reward == 0.5
    assert (await judged(place, "", partial=True)).reward == 0.0  # doing nothing earns nothing


async def test_all_tests_where_none_is_named(place: WorkFactory) -> None:
    none: dict[str, Any] = {"must_pass": [], "must_keep": []}
    assert (await judged(place, FIX, **none)).reward == 1.0
    verdict = await judged(place, "", **none)
    assert (verdict.reward, verdict.detail["failed"]) == (0.0, [ADD])


async def test_a_test_that_is_not_there_has_failed(place: WorkFactory) -> None:
    verdict = await judged(place, FIX, must_pass=[ADD, "tests/test_calc.py::test_more"])
    assert verdict.detail["must_pass_failed"] == ["tests/test_calc.py::test_more"]
    assert verdict.reward == 0.0


async def test_code_that_can_not_be_imported(place: WorkFactory) -> None:
    assert (await judged(place, "echo 'raise SystemExit(0)' > calc.py")).reward == 0.0
    assert (await judged(place, "rm calc.py")).reward == 0.0
    assert (await judged(place, "rm -r ../workspace; mkdir ../workspace")).reward == 0.0


async def test_code_in_folders_that_the_agent_made_or_moved(place: WorkFactory) -> None:
    moved = "rm calc.py; mkdir calc; printf 'from calc.inner import add, same\\n' > calc/__init__.py; "
    moved += "printf 'def add(a, b): return a + b\\ndef same(a): return a\\n' > calc/inner.py"
    assert (await judged(place, moved)).reward == 1.0


async def test_endless_loops_are_the_agents_own(place: WorkFactory) -> None:
    verdict = await judged(place, "echo 'while True: pass' > calc.py", timeout_seconds=3)
    assert (verdict.reward, verdict.detail["why"]) == (0.0, "The tests took too long.")


async def test_the_graders_files_are_put_over(place: WorkFactory) -> None:
    hidden = {"type": "upload_file", "target": "tests/test_calc.py", "content": "def test_add():\n    assert False\n"}
    work = await place.create_work(FIX, files=FILES)
    config = {"command": PYTEST, "must_pass": [ADD], "files": [hidden]}
    assert (await evaluator.ProjectTests(config).evaluate(work)).reward == 0.0


async def test_a_workspace_that_was_too_large_to_keep(place: WorkFactory) -> None:
    work = await place.create_work(FIX + "; rm pytest.ini", files=FILES)
    work.initial_workspace = None
    verdict = await evaluator.ProjectTests({"command": PYTEST, **NAMED}).evaluate(work)
    assert (verdict.reward, verdict.detail["dropped"]) == (1.0, ["pytest.ini"])


async def test_a_workspace_that_was_too_large_to_take_is_not_the_agents_doing(place: WorkFactory) -> None:
    fill = {"type": "exec", "command": "head -c 2000000 /dev/zero > large"}
    work = await place.create_work("", files=FILES, runtime={"prepare": [fill]})
    work.initial_workspace = None
    with pytest.raises(GraderError, match="max_mb"):
        await evaluator.ProjectTests({"command": PYTEST, **NAMED, "max_mb": 1}).evaluate(work)


async def test_an_agent_that_leaves_too_much(place: WorkFactory) -> None:
    verdict = await judged(place, f"{FIX}; head -c 3000000 /dev/zero > large", max_mb=1)
    assert verdict.reward == 0.0
    assert "larger than" in verdict.detail["why"]


async def test_no_pytest_is_no_reward(place: WorkFactory) -> None:
    with pytest.raises(GraderError, match="No module named '_pytest'"):
        await judged(place, FIX, command="/usr/bin/python3 -m pytest")
    with pytest.raises(GraderError, match="no-such-python"):
        await judged(place, FIX, command="python-no-such-python -m pytest")


async def test_a_live_runtime_gets_its_tests_back(place: WorkFactory) -> None:
    work = await place.create_work(
        f"{FIX}; echo > tests/test_calc.py; echo 'import os; os._exit(0)' > conftest.py",
        files=FILES,
        evaluator={"refresh_runtime": False},
    )
    verdict = await evaluator.ProjectTests({"command": PYTEST, **NAMED}).evaluate(work)
    assert verdict.reward == 1.0
    assert verdict.detail["live"] is True
    assert verdict.detail["dropped"] == ["conftest.py", "tests/test_calc.py"]


async def test_settings_that_can_not_be_used() -> None:
    with pytest.raises(ConfigError, match=r"config\.must_passs: there is no such field"):
        evaluator.ProjectTests({"must_passs": []})
    with pytest.raises(ConfigError, match=r"config\.command"):
        evaluator.ProjectTests({"command": "make test"})
    with pytest.raises(ConfigError, match="result_files"):
        evaluator.ProjectTests({"command": "make test", "results": "junit"})


PASS_ALL = (
    "import pytest\n\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport(item, call):\n"
    "    outcome = yield\n    report = outcome.get_result()\n    report.outcome = 'passed'\n"
)

CHEATS = {
    "rewritten_test": "printf 'def test_add(): pass\\ndef test_same(): pass\\n' > tests/test_calc.py",
    "linked_test": (
        "printf 'def test_add(): pass\\ndef test_same(): pass\\n' > mine.py; rm tests/test_calc.py; "
        "ln -s ../mine.py tests/test_calc.py"
    ),
    "linked_folder": (
        "mkdir mine; printf 'def test_add(): pass\\ndef test_same(): pass\\n' > mine/test_calc.py; "
        "mv mine/test_calc.py mine/x; rm -r tests; ln -s mine tests; cp mine/x mine/test_calc.py"
    ),
    "deleted_tests": "rm -r tests",
    "conftest": "cat > conftest.py <<'E'\n" + PASS_ALL + "E",
    "conftest_in_tests": "cat > tests/conftest.py <<'E'\n" + PASS_ALL + "E",
    "plugin_by_ini": "cat > cheat.py <<'E'\n" + PASS_ALL + "E\nprintf '[pytest]\\naddopts = -p cheat\\n' > pytest.ini",
    "plugin_by_setup_cfg": (
        "rm pytest.ini; cat > cheat.py <<'E'\n" + PASS_ALL + "E\n"
        "printf '[tool:pytest]\\naddopts=-p cheat\\n' > setup.cfg"
    ),
    "plugin_by_pyproject": (
        "rm pytest.ini; cat > cheat.py <<'E'\n" + PASS_ALL + "E\n"
        "printf '[tool.pytest.ini_options]\\naddopts = \"-p cheat\"\\n' > pyproject.toml"
    ),
    "plugin_by_entry_point": (
        "cat > cheat.py <<'E'\n" + PASS_ALL + "E\nmkdir cheat-1.dist-info; "
        "printf 'Metadata-Version: 2.1\\nName: cheat\\nVersion: 1\\n' > cheat-1.dist-info/METADATA; "
        "printf '[pytest11]\\ncheat = cheat\\n' > cheat-1.dist-info/entry_points.txt"
    ),
    "own_pytest": (
        "mkdir pytest; printf 'def main(*a, **k): return 0\\ndef hookimpl(*a, **k): pass\\n' > pytest/__init__.py; "
        "cp -r pytest _pytest; cp -r pytest pluggy"
    ),
    "module_of_the_library": (
        "printf 'class Always(int):\\n    def __eq__(self, other): return True\\n' > colorsys.py; "
        "printf 'import colorsys\\nadd = same = lambda *numbers: colorsys.Always()\\n' > calc.py"
    ),
    "sitecustomize": "printf 'import os\\nos._exit(0)\\n' > sitecustomize.py; cp sitecustomize.py usercustomize.py",
    "exit_at_import": "printf 'import os\\nos._exit(0)\\n' >> calc.py",
    "exit_when_called": "printf 'import os\\ndef add(a, b): os._exit(0)\\n' >> calc.py",
    "pytest_exit": "printf 'import pytest\\ndef add(a, b): pytest.exit(\"done\", returncode=0)\\n' >> calc.py",
    "skip": "printf 'import pytest\\ndef add(a, b): pytest.skip(\"no\")\\n' >> calc.py",
    "exchanged_function": "printf 'import _pytest.python as p\\np.Function.runtest = lambda self: None\\n' >> calc.py",
    "exchanged_code": (
        "printf 'import _pytest.python as p\\ndef f(self): pass\\n' >> calc.py; "
        "printf 'p.Function.runtest.__code__ = f.__code__\\n' >> calc.py"
    ),
    "exchanged_report": (
        "cat >> calc.py <<'E'\nimport _pytest.reports as r\nmake = r.TestReport.from_item_and_call\n"
        "import _pytest.runner\ndef made(item, call):\n    call.excinfo = None\n    return make(item, call)\n"
        "_pytest.runner.pytest_runtest_makereport = made\n"
        "def check(call, *rest): pass\n_pytest.runner.CallInfo.from_call.__func__.__code__ = check.__code__\nE"
    ),
    "written_results": (
        "cat >> calc.py <<'E'\nimport atexit, glob, json, sys\n\n\ndef write():\n"
        "    own = sys.argv[0].replace('reporter.py', 'results')\n"
        "    for file in [*glob.glob('/tmp/polar-*/results'), own]:\n"
        "        ids = ['tests/test_calc.py::test_add', 'tests/test_calc.py::test_same']\n"
        "        with open(file, 'w') as out:\n"
        "            for id in ids:\n"
        "                out.write('0' * 64 + ' ' + json.dumps({'names': [id], 'outcome': 'passed'}) + '\\n')\n"
        "            out.write('0' * 64 + ' ' + json.dumps({'finished': 0}) + '\\n')\n\n\natexit.register(write)\nE"
    ),
    "removed_results": (
        'printf \'import sys, os\\nos.unlink(sys.argv[0].replace("reporter.py", "results"))\\n\' >> calc.py'
    ),
    "a_file_for_the_results_folder": (
        "cat >> calc.py <<'E'\nimport os, sys, shutil\nfolder = os.path.dirname(sys.argv[0])\n"
        "shutil.rmtree(folder)\nopen(folder, 'w').close()\nE"
    ),
    "a_loop_for_the_results_folder": (
        "cat >> calc.py <<'E'\nimport os, sys, shutil\nfolder = os.path.dirname(sys.argv[0])\n"
        "shutil.rmtree(folder)\nos.symlink(folder, folder)\nE"
    ),
}


QUICK = ("linked_test", "conftest", "exit_at_import", "written_results")


@pytest.mark.parametrize("name", leave_to_slow(CHEATS, but=QUICK))
async def test_cheats_earn_nothing(place: WorkFactory, name: str) -> None:
    verdict = await judged(place, CHEATS[name], env=WITH_PLUGINS if name == "plugin_by_entry_point" else {})
    assert verdict.reward == 0.0, verdict


@pytest.mark.parametrize(
    "name", leave_to_slow(["deleted_tests", "exit_when_called", "pytest_exit", "skip"], but=["skip"])
)
async def test_nor_where_no_test_is_named(place: WorkFactory, name: str) -> None:
    assert (await judged(place, CHEATS[name], must_pass=[], must_keep=[])).reward == 0.0


NAIVE = ("rewritten_test", "linked_test", "conftest", "plugin_by_ini", "exit_at_import", "exchanged_function")


@pytest.mark.parametrize("name", leave_to_slow(NAIVE, but=["linked_test"]))
async def test_they_would_elsewhere(place: WorkFactory, name: str) -> None:
    """In the agent's own folder, by pytest's exit code."""
    work = await place.create_work(CHEATS[name], files=FILES, evaluator={"refresh_runtime": False})
    done = await work.agent_runtime.run([sys.executable, "-m", "pytest", "-q"], output=work.logs / "naive.log")
    assert done.exit_code == 0, (work.logs / "naive.log").read_text()


JUNIT = {
    "command": f"{PYTEST} --junitxml=out/junit.xml || true",
    "results": "junit",
    "result_files": ["out/*.xml"],
}


async def test_junit(place: WorkFactory) -> None:
    assert (await judged(place, FIX, **JUNIT)).reward == 1.0
    assert (await judged(place, "", **JUNIT)).reward == 0.0
    planted = (
        'mkdir out; printf \'<testsuite><testcase classname="tests.test_calc" name="test_add"/><testcase '
        'classname="tests.test_calc" name="test_same"/></testsuite>\' > out/junit.xml'
    )
    assert (await judged(place, planted, **{**JUNIT, "command": "false"})).reward == 0.0
    stale = {"out/junit.xml": "<testsuite/>"}
    with pytest.raises(GraderError, match="before any test is run"):
        await judged(place, FIX, files=stale, **JUNIT)
    for broken, how in (("no-such-program", "can't be run"), ("true", "ends with 0")):
        with pytest.raises(GraderError, match=f"{how}.*without the agent's work"):
            await judged(place, FIX, **{**JUNIT, "command": broken})


async def test_junit_files_below_the_workspace_may_be_absolute(place: WorkFactory) -> None:
    assert (await judged(place, FIX, **{**JUNIT, "result_files": ["/workspace/out/junit.xml"]})).reward == 1.0
    for elsewhere in ("/tmp/out/junit.xml", "/workspace"):
        with pytest.raises(GraderError, match=f"config.result_files: {elsewhere} is not below /workspace"):
            await judged(place, FIX, **{**JUNIT, "result_files": [elsewhere]})


@pytest.mark.parametrize(
    "command",
    leave_to_slow(["test -e made || exit 3", "until [ -e made ]; do sleep 0.1; done"], but=["test -e made || exit 3"]),
)
async def test_a_command_that_writes_no_results_for_unfinished_work(place: WorkFactory, command: str) -> None:
    config = {**JUNIT, "command": f"{command}; {JUNIT['command']}"}
    assert (await judged(place, FIX, **config, timeout_seconds=2)).reward == 0.0
    assert (await judged(place, f"{FIX}; touch made", **config)).reward == 1.0


@pytest.mark.parametrize(
    "left", leave_to_slow(["touch a", "ln -s a a", "mkdir a; ln -s b a/b", "mkdir a; touch a/b"], but=["ln -s a a"])
)
async def test_a_workspace_that_is_gone_after_the_command(place: WorkFactory, left: str) -> None:
    work = await place.create_work("touch gone", files=FILES, runtime={"workdir": "/a/b"})
    command = f"if [ -e gone ]; then cd ../..; rm -r a; {left}; exit; fi; {JUNIT['command']}"
    verdict = await evaluator.ProjectTests({**JUNIT, **NAMED, "command": command}).evaluate(work)
    assert verdict.reward == 0.0
    assert verdict.detail["why"].startswith(("The workspace can't be read", "The tests wrote no results"))


@pytest.mark.parametrize(
    ("python", "prepare"),
    [
        (".venv/bin/python", ""),
        ("/workspace/.venv/bin/python", ""),
        ("python9", ""),
        ("../link/python", "ln -s workspace/.venv/bin ../link"),
        ("../link", "ln -s workspace/.venv/bin/python ../link"),
        (
            "../link/python",
            "mkdir ../bin; ln -s PYTHON ../bin/python; ln -s ../bin there; ln -s workspace/there ../link",
        ),
        (".venv/../../bin/python", "mkdir ../bin; ln -s PYTHON ../bin/python"),
    ],
)
async def test_an_interpreter_of_the_workspace_is_not_told_the_secret(
    place: WorkFactory, python: str, prepare: str
) -> None:
    steps = f"mkdir -p .venv/bin; ln -s PYTHON .venv/bin/python; ln -s python .venv/bin/python9; {prepare}"
    made = {"type": "exec", "command": steps.replace("PYTHON", sys.executable)}
    path = {"PATH": ".venv/bin:/usr/bin:/bin"}
    work = await place.create_work(FIX, files=FILES, runtime={"prepare": [made], "env": path})
    fresh = await work.create_fresh_runtime()
    plan = signed_run.RunnerCommand("pytest", fresh.path(python) if python.startswith("/") else python, [])
    with pytest.raises(GraderError, match="outside of /workspace"):
        await signed_run.SignedRun(fresh, plan, WITHOUT_PLUGINS, work.scratch).check(work.logs / "log")


async def test_an_interpreter_that_the_agent_puts_before_another(place: WorkFactory) -> None:
    path = {"PATH": f"bin:{Path(sys.executable).parent}:/usr/bin:/bin"}
    shim = "mkdir bin; printf '#!/bin/sh\\ntouch ../called\\n' > bin/python3; chmod +x bin/python3"
    work = await place.create_work(f"{FIX}; {shim}", files=FILES, runtime={"env": path})
    verdict = await evaluator.ProjectTests(NAMED).evaluate(work)
    assert verdict.reward == 1.0, verdict


async def test_deletions_need_no_more_than_rm(place: WorkFactory, tmp_path: Path) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("sh", "rm", "sed", "touch", "readlink"):
        (programs / name).symlink_to(shutil.which(name) or name)
    other = {f"old/{number}.py": "" for number in range(250)}
    odd = {"type": "exec", "command": "touch \"$(printf 'odd\\377 \\047.txt')\" -- -f"}
    agent = f"{FIX}; rm -r old; rm -- odd* -f"
    files = {**FILES, **other, "test_old.py": ""}
    work = await place.create_work(agent, files=files, runtime={"prepare": [odd], "env": {"PATH": str(programs)}})
    keeps = (
        "import pathlib\ndef test_add(): assert not [*pathlib.Path().glob('o*/*.py'), *pathlib.Path().glob('odd*')]\n"
    )
    file = {"type": "upload_file", "target": "tests/test_calc.py", "content": keeps}
    config = {"command": PYTEST, "must_pass": [ADD], "files": [file]}
    verdict = await evaluator.ProjectTests(config).evaluate(work)
    assert verdict.reward == 1.0, verdict


UNITTEST = {
    "test_it.py": (
        "import unittest\nimport calc\n\n\nclass T(unittest.TestCase):\n    def test_add(self):\n"
        '        """Adds two."""\n        self.assertEqual(calc.add(1, 2), 3)\n\n'
        "    def test_parts(self):\n        for a in (0, 1):\n            with self.subTest(a=a):\n"
        "                self.assertEqual(calc.add(a, 0), a)\n"
        "                self.assertEqual(calc.add(a, 1), a + 1)\n\n"
        "    @unittest.skip('no')\n    def test_skipped(self):\n        pass\n"
    )
}


async def test_unittest(place: WorkFactory) -> None:
    names = ["test_add (test_it.T)", "test_it.T.test_add", "Adds two.", "test_parts (test_it.T)"]
    config = {"command": f"{sys.executable} -m unittest -v test_it", "must_pass": names, "must_keep": []}
    assert (await judged(place, FIX, UNITTEST, **config)).reward == 1.0
    verdict = await judged(place, "", UNITTEST, **config)
    assert (verdict.reward, verdict.detail["must_pass_failed"]) == (0.0, names)
    skipped = {**config, "must_pass": ["test_skipped (test_it.T)"]}
    assert (await judged(place, FIX, UNITTEST, **skipped)).reward == 0.0
    left = "printf 'import os\\nos._exit(0)\\n' >> calc.py"
    assert (await judged(place, left, UNITTEST, **config)).reward == 0.0


@pytest.fixture
def with_pytest(tmp_path: Path) -> dict[str, Any]:
    """The runtime's fields for a sandbox whose own Python finds pytest."""
    packages = Path(pytest.__file__).parent.parent
    names = ["pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments"]
    names += [folder.name for folder in packages.glob("pluggy-*.dist-info")]
    steps = [{"type": "upload_dir", "source": str(packages / name), "target": f"/opt/py/{name}"} for name in names]
    steps.append({"type": "upload_file", "source": str(packages / "py.py"), "target": "/opt/py/py.py"})
    return {"prepare": steps, "env": {"PYTHONPATH": "/workspace/src:/opt/py"}}


@pytest.mark.runtimes
@pytest.mark.parametrize(
    ("agent", "reward"),
    [
        (FIX, 1.0),
        ("", 0.0),
        ("mkdir -p src/_pytest; echo 'raise SystemExit(0)' | tee src/_pytest/__init__.py src/sitecustomize.py", 0.0),
        ("(while :; do sleep 0.01; echo 1 > /tmp/x; done) & " + CHEATS["exit_at_import"], 0.0),
        ("printf 'x = []\\nwhile True: x.append(bytearray(10**7))\\n' >> calc.py", 0.0),
    ],
)
async def test_in_a_sandbox(sandbox: WorkFactory, with_pytest: dict[str, Any], agent: str, reward: float) -> None:
    work = await sandbox.create_work(agent, files=FILES, runtime={**with_pytest, "memory_mb": 300})
    verdict = await evaluator.ProjectTests({**NAMED, "timeout_seconds": 60}).evaluate(work)
    assert verdict.reward == reward, verdict


def test_which_files_are_protected() -> None:
    config = ProtectionConfig(protected=["data/*.json"], allowed=["pyproject.toml", "docs/**"])
    protected = ProtectedFiles(config, files=["a/b.txt"])
    for path in (
        "tests",
        "tests/a/b.txt",
        "src/pkg/tests/x.py",
        "src/test_x.py",
        "x_test.py",
        "a/conftest.py",
        "conftest.py/x",
        "src/x.egg-info/entry_points.txt",
        "data/x.json",
        "a/b.txt",
        "a/b.txt/c",
        "test/x",
    ):
        assert protected.covers(path), path
    free = ("src/x.py", "pyproject.toml", "docs/conftest.py", "latest/x", "django/test/x.py", "data/a/x.json", "a")
    for path in free:
        assert not protected.covers(path), path


def test_a_folder_with_protected_files_stays() -> None:
    link = FileChange("pkg", None, FolderEntry("120000", 1))
    plain = FileChange("other", None, FolderEntry("120000", 1))
    protected, prepared = ProtectedFiles(ProtectionConfig()), ["pkg/tests/test_x.py", "other/x.py"]
    kept, dropped = protected.split_changes([link, plain], prepared, protected.list_protected(prepared))
    assert (kept, dropped) == ([plain], [link])


def test_how_tests_are_named() -> None:
    found = [
        CaseResult(("a/test_b.py::C::test_d[x::y]",), "passed"),
        CaseResult(("a/test_b.py::test_e",), "passed"),
        CaseResult(("a/test_c.py::test_e",), "failed"),
        CaseResult(("m.C::test_f",), "passed"),
    ]
    named = ["a/test_b.py::C::test_d[x::y]", "a/test_b.py::test_e", "test_e", "m.C::test_f", "a.test_b::test_e", "no"]
    assert results.match_named_tests(found, named).failed == ["test_e", "no"]
    assert results.list_node_files(named) == ["a/test_b.py", "m.C", "a.test_b"]


@pytest.fixture
def junit(tmp_path: Path) -> Callable[..., RunResults]:
    def read(*contents: bytes) -> RunResults:
        files = []
        for number, content in enumerate(contents):
            files.append(tmp_path / f"{number}.xml")
            files[-1].write_bytes(content)
        return results.parse_junit(files)

    return read


def test_junit_cases(junit: Callable[..., RunResults]) -> None:
    run = junit(
        b'<testsuites><testsuite><testcase classname="a.B" name="c" file="a.py"/>'
        b'<testcase name="d"><system-out>x</system-out><skipped/></testcase></testsuite></testsuites>',
        b'<testcase name="e"><skipped/><failure/></testcase>',
    )
    assert run.results == [
        CaseResult(("a.B::c", "a.B.c", "a.py::c"), "passed"),
        CaseResult(("d",), "skipped"),
        CaseResult(("e",), "failed"),
    ]


def test_junit_files_that_are_none(junit: Callable[..., RunResults]) -> None:
    declared = "<!DOCTYPE x [<!ENTITY a 'b'>]><x/>"
    for data in (b"<x", declared.encode(), declared.encode("utf-16"), b"", b"<a>" * 1000):
        with pytest.raises(BrokenResultsError):
            junit(data)


def test_junit_files_are_read_up_to_a_limit(junit: Callable[..., RunResults], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "_MAX_JUNIT_BYTES", 100)
    monkeypatch.setattr(results, "_MAX_TESTS", 3)
    assert len(junit(b"<a><testcase/><testcase/></a>", b"<testcase/>").results) == 3
    with pytest.raises(BrokenResultsError, match="more than 3 tests"):
        junit(b"<a><testcase/><testcase/></a>", b"<a><testcase/><testcase/></a>")
    with pytest.raises(BrokenResultsError, match="larger than"):
        junit(b"<a>" + b" " * 60 + b"</a>", b"<a>" + b" " * 60 + b"</a>")


@pytest.mark.parametrize(
    ("written", "why"),
    [
        (b"\n" * 10, "something else"),
        (b"x" * 200, "longer than 100 bytes"),
        (b"x" * 50, "in the middle of a record"),
        ({"names": 5, "outcome": "passed"}, "never writes"),
        ({"evidence": {}}, "never writes"),
        ([], "never writes"),
    ],
)
def test_signed_results_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: Any, why: str) -> None:
    """Code under test may have found the secret, or write to the file."""
    monkeypatch.setattr(results, "_MAX_RECORD_BYTES", 100)
    file = tmp_path / "results"
    if not isinstance(written, bytes):
        text = json.dumps(written).encode()
        mark = hmac.new(b"secret", b"0 " + text, hashlib.sha256).hexdigest().encode()
        monkeypatch.setattr(results, "_MAX_RECORD_BYTES", 1000)
        written = mark + b" " + text + b"\n"
    file.write_bytes(written)
    with pytest.raises(BrokenResultsError, match=why):
        results.parse_signed_results(file, "secret")


def test_commands() -> None:
    assert signed_run.parse_command("pytest -q") == signed_run.RunnerCommand("pytest", "python3", ["-q"])
    assert signed_run.parse_command("/x/python3.9 -m pytest 'a b'") == signed_run.RunnerCommand(
        "pytest", "/x/python3.9", ["a b"]
    )
    assert signed_run.parse_command("./tests/runtests.py --parallel 1") == signed_run.RunnerCommand(
        "unittest", "python3", ["./tests/runtests.py", "--parallel", "1"]
    )
    assert signed_run.parse_command("make test") is None
    assert signed_run.parse_command([]) is None
