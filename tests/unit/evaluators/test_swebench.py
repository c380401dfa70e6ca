"""The evaluator `swebench`, on a small repository with real git and pytest."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from polar.errors import ConfigError
from polar.evaluators.base import GraderError
from polar.evaluators.changes import find_changes
from polar.evaluators.patches import list_patch_paths, make_patch
from polar.evaluators.swebench import SweBench
from polar.records.session import Verdict
from polar.testing.grading import AgentWork, WorkFactory
from tests.selection import leave_to_slow

FILES = {
    "calc/__init__.py": "def add(a, b):\n    return a - b\n\n\ndef same(a):\n    return a\n",
    "calc/tests/__init__.py": "",
    "calc/tests/test_calc.py": "from calc import same\n\n\ndef test_same():\n    assert same(1) == 1\n",
    "setup.cfg": "[tool:pytest]\n",
}
GIT = {
    "type": "exec",
    "command": "git init -q . && git add -A && git -c user.name=a -c user.email=a@b commit -q -m base",
}
TEST_PATCH = """\
diff --git a/calc/tests/test_calc.py b/calc/tests/test_calc.py
--- a/calc/tests/test_calc.py
+++ b/calc/tests/test_calc.py
@@ -1,5 +1,13 @@
-from calc import same
+import pytest
+
+from calc import add, same
+
+
+@pytest.mark.parametrize("a", [1, 2])
+def test_add(a):
+    assert add(a, 2) == a + 2
 
 
 def test_same():
     assert same(1) == 1
+
"""
FIX = "sed -i 's/a - b/a + b/' calc/__init__.py"
FAIL_TO_PASS = ["calc/tests/test_calc.py::test_add[1]", "calc/tests/test_calc.py::test_add[2]"]
PASS_TO_PASS = ["calc/tests/test_calc.py::test_same"]
ROW: dict[str, Any] = {
    "instance_id": "calc__calc-1",
    "repo": "calc/calc",
    "base_commit": "abc",
    "patch": "diff --git ...",
    "test_patch": TEST_PATCH,
    "FAIL_TO_PASS": json.dumps(FAIL_TO_PASS),
    "PASS_TO_PASS": json.dumps(PASS_TO_PASS),
    "version": "1.0",
    "environment_setup_commit": "abc",
    "hints_text": "",
    "problem_statement": "It subtracts.",
    "created_at": "2024-01-01T00:00:00Z",
    "test_command": f"{sys.executable} -m pytest {{files}}",
}


async def worked(place: WorkFactory, agent: str) -> AgentWork:
    return await place.create_work(agent, files=FILES, runtime={"prepare": [GIT]})


async def judged(place: WorkFactory, agent: str, **row: Any) -> Verdict:
    return await SweBench({**ROW, **row}).evaluate(await worked(place, agent))


async def test_resolved_and_not(place: WorkFactory) -> None:
    verdict = await judged(place, FIX)
    assert (verdict.reward, verdict.detail["resolved"]) == (1.0, True)
    verdict = await judged(place, "echo '# nothing' >> calc/__init__.py")
    assert verdict.reward == 0.0
    assert verdict.detail["FAIL_TO_PASS_failed"] == FAIL_TO_PASS
    verdict = await judged(place, f"{FIX}; sed -i 's/return a$/return 2/' calc/__init__.py")
    assert (verdict.reward, verdict.detail["PASS_TO_PASS_failed"]) == (0.0, PASS_TO_PASS)


async def test_the_model_patch_is_kept_and_applies(place: WorkFactory, tmp_path: Path) -> None:
    work = await worked(
        place, f"{FIX}; echo 'x = 1' > calc/new.py; git -c user.name=a -c user.email=a@b commit -qam mine; rm setup.cfg"
    )
    assert (await SweBench(ROW).evaluate(work)).reward == 1.0
    text = (work.logs / "model.patch").read_text()
    assert "+    return a + b" in text
    assert "calc/new.py" in text
    assert "setup.cfg" not in text
    assert "a + b" in applied(work.logs / "model.patch", tmp_path / "applied")


def applied(file: Path, folder: Path) -> str:
    """The code, once git has applied a patch to it."""
    code = folder / "calc" / "__init__.py"
    code.parent.mkdir(parents=True)
    code.write_text(FILES["calc/__init__.py"])
    subprocess.run(["git", "apply", file], cwd=folder, check=True)
    return code.read_text()


async def test_an_empty_patch_is_not_run(place: WorkFactory) -> None:
    for agent in ("", "echo > calc/tests/test_calc.py; touch conftest.py; rm setup.cfg"):
        work = await worked(place, agent)
        verdict = await SweBench(ROW).evaluate(work)
        assert (verdict.reward, verdict.detail["why"]) == (0.0, "The model patch is empty.")
        assert not (work.logs / "swebench.log").exists()


async def test_a_test_patch_that_does_not_apply_is_no_reward(place: WorkFactory) -> None:
    with pytest.raises(GraderError, match="does not apply"):
        await judged(place, FIX, test_patch=TEST_PATCH.replace("-from calc import same", "-from calc import other"))


async def test_the_repository_is_the_workspace(place: WorkFactory) -> None:
    assert (await judged(place, FIX, repo_dir="/workspace/")).reward == 1.0
    with pytest.raises(GraderError, match=r"repo_dir is /testbed.*runtime\.workdir"):
        await judged(place, FIX, repo_dir="/testbed")


async def test_a_workspace_that_was_too_large_to_keep(place: WorkFactory) -> None:
    work = await worked(place, FIX)
    work.initial_workspace = None
    assert (await SweBench(ROW).evaluate(work)).reward == 1.0


async def test_a_live_runtime_is_refused(place: WorkFactory) -> None:
    work = await place.create_work(FIX, files=FILES, evaluator={"refresh_runtime": False})
    with pytest.raises(GraderError, match="refresh_runtime"):
        await SweBench(ROW).evaluate(work)


CHEATS = [
    "printf 'def test_add(): pass\\ndef test_same(): pass\\n' > calc/tests/test_calc.py; echo >> calc/__init__.py",
    "rm -r calc/tests; mkdir mine; echo 'x = 1' > mine/x.py; ln -s ../mine calc/tests",
    "mv calc real; ln -s real calc; rm -r real/tests",
    "printf '[tool:pytest]\\naddopts = --collect-only\\n' > setup.cfg; echo >> calc/__init__.py",
    "printf 'import os\\nos._exit(0)\\n' >> calc/__init__.py",
    "printf '[core]\\nfsmonitor = \"touch /tmp/ran; false\"\\n' >> .git/config; echo >> calc/__init__.py",
]


@pytest.mark.parametrize("agent", leave_to_slow(CHEATS, but=[CHEATS[1], CHEATS[-1]]))
async def test_cheats_earn_nothing(place: WorkFactory, agent: str) -> None:
    assert (await judged(place, agent)).reward == 0.0


async def test_names_as_unittest_prints_them(place: WorkFactory) -> None:
    tests = [
        "import unittest",
        "from calc import add",
        "class Adding(unittest.TestCase):",
        "    def test_add(self):",
        '        """Adds."""',
        "        self.assertEqual(add(1, 2), 3)",
        "unittest.main()",
    ]
    new = "diff --git a/runtests.py b/runtests.py\nnew file mode 100644\n--- /dev/null\n+++ b/runtests.py\n"
    new += f"@@ -0,0 +1,{len(tests)} @@\n" + "".join(f"+{line}\n" for line in tests)
    row = {"test_patch": new, "PASS_TO_PASS": [], "test_command": f"{sys.executable} runtests.py -v"}
    for name in ("test_add (__main__.Adding)", "Adds."):
        assert (await judged(place, FIX, **row, FAIL_TO_PASS=[name])).reward == 1.0
        assert (await judged(place, "echo >> calc/__init__.py", **row, FAIL_TO_PASS=[name])).reward == 0.0


def test_rows_that_can_not_be_used() -> None:
    with pytest.raises(ConfigError, match=r"config\.FAIL_TO_PASS"):
        SweBench({**ROW, "FAIL_TO_PASS": "[]"})
    with pytest.raises(ConfigError, match=r"config\.test_patch"):
        SweBench({**ROW, "test_patch": "nothing"})
    with pytest.raises(ConfigError, match=r"config\.test_command"):
        SweBench({**ROW, "test_command": "make"})
    with pytest.raises(ConfigError, match=r"config\.PASS_TO_PASS"):
        SweBench({**ROW, "PASS_TO_PASS": "no list"})


def test_the_files_of_a_patch(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    names = ["a b.py", 'q"uote.py', "größe.py", "same.py", "gone.py", "empty.py"]
    for top in (before, after):
        top.mkdir()
    for name in names:
        (before / name).write_text("--- a/not_this.py\n")
        (after / name).write_text("+++ b/nor_this.py\n")
    (after / "gone.py").unlink()
    (before / "empty.py").unlink()
    (after / "empty.py").write_text("")
    (before / "same.py").write_text("")
    (after / "same.py").write_text("")
    text = make_patch(before, after, find_changes(before, after)).text.decode()
    assert sorted(list_patch_paths(text)) == sorted({*names} - {"same.py"})
    assert sorted(list_patch_paths(text, existing_only=True)) == sorted({*names} - {"same.py", "gone.py"})
    renamed = "diff --git a/x.py b/y.py\nsimilarity index 100%\nrename from x.py\nrename to y.py\n"
    assert list_patch_paths(renamed) == ["x.py", "y.py"]
    assert list_patch_paths(renamed, existing_only=True) == ["y.py"]
