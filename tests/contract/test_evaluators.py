"""The contract of evaluators, kept by those of Polar."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import web

from polar.config import JudgeSettings
from polar.evaluators.base import Outcome
from polar.plugins import load
from polar.runtimes.base import RuntimeBackend
from polar.runtimes.bubblewrap import Bubblewrap
from polar.testing import AgentRun, EvaluatorContract
from polar.testing.grading import AgentWork, WorkFactory

HELLO = AgentRun("echo hello > hello.txt")
WRONG = AgentRun("echo goodbye > hello.txt")
CHECK = '[ "$(cat hello.txt)" = hello ]'


class TestSessionCompleted(EvaluatorContract):
    plugin = load("evaluators", "session_completed")
    solved = AgentRun()
    failed = AgentRun(outcome=Outcome("finished", 1, 1.0))


class TestCommand(EvaluatorContract):
    plugin = load("evaluators", "command")
    config = {"command": CHECK}
    files = {"hello.txt": "not yet"}
    solved = HELLO
    failed = WRONG


@pytest.mark.slow
class TestProjectTests(EvaluatorContract):
    plugin = load("evaluators", "tests")
    config = {"command": f"{sys.executable} -m pytest", "must_pass": ["test_calc.py::test_add"]}
    files = {
        "calc.py": "def add(a, b):\n    return a - b\n",
        "test_calc.py": "import calc\n\n\ndef test_add():\n    assert calc.add(1, 2) == 3\n",
    }
    solved = AgentRun("sed -i 's/a - b/a + b/' calc.py")
    failed = AgentRun("echo '# nothing' >> calc.py")


TEST_PATCH = """\
diff --git a/test_calc.py b/test_calc.py
new file mode 100644
--- /dev/null
+++ b/test_calc.py
@@ -0,0 +1,5 @@
+import calc
+
+
+def test_add():
+    assert calc.add(1, 2) == 3
"""


@pytest.mark.slow
class TestSweBench(EvaluatorContract):
    plugin = load("evaluators", "swebench")
    config = {
        "instance_id": "calc-1",
        "test_patch": TEST_PATCH,
        "FAIL_TO_PASS": ["test_calc.py::test_add"],
        "test_command": f"{sys.executable} -m pytest {{files}}",
    }
    files = {"calc.py": "def add(a, b):\n    return a - b\n"}
    solved = TestProjectTests.solved
    failed = TestProjectTests.failed


@pytest.mark.runtimes
class TestHarbor(EvaluatorContract):
    """Its tests stand at the root, so it takes a runtime that has one."""

    plugin = load("evaluators", "harbor")
    files = {"hello.txt": "not yet"}
    solved = HELLO
    failed = WRONG

    @pytest.fixture(autouse=True)
    async def tests(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        backend = self.make_backend(tmp_path / "state")
        why = await backend.check_availability()
        await backend.close()
        if why is not None:
            pytest.skip(f"no bubblewrap here: {why}")
        folder = tmp_path / "tests"
        folder.mkdir()
        (folder / "test.sh").write_text(f"if {CHECK}; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n")
        monkeypatch.setattr(type(self), "config", {"tests": str(folder)})

    def make_backend(self, folder: Path) -> RuntimeBackend:
        return Bubblewrap(folder, "http://127.0.0.1:1")


class TestAnswer(EvaluatorContract):
    plugin = load("evaluators", "answer")
    config = {"expected": "teal", "file": "answer.txt"}
    files = {"answer.txt": "?"}
    solved = AgentRun("echo 'Answer: Teal.' > answer.txt")
    failed = AgentRun("echo 'Answer: red' > answer.txt")


class TestWeighted(EvaluatorContract):
    plugin = load("evaluators", "weighted")
    config = {
        "parts": [
            {"strategy": "command", "config": {"command": CHECK}, "weight": 2},
            {"strategy": "answer", "config": {"expected": "done"}},
        ]
    }
    files = {"hello.txt": "not yet"}
    solved = HELLO._replace(answer="Done.")
    failed = WRONG._replace(answer="Done.")


class TestJudge(EvaluatorContract):
    """With a small server in place of the model: it likes answers that say hello."""

    plugin = load("evaluators", "judge")
    config = {"rubric": "Does it greet?", "judge": "model"}
    solved = AgentRun(answer="Hello.")
    failed = AgentRun(answer="Go away.")

    @pytest_asyncio.fixture(autouse=True)
    async def model_url(self) -> AsyncIterator[str]:
        async def answer(request: web.Request) -> web.Response:
            said = "\n".join(message["content"] for message in (await request.json())["messages"])
            score = 10 if "Hello." in said else 0
            content = f'{{"explanation": "Because.", "scores": {{"overall": {score}}}}}'
            return web.json_response({"choices": [{"message": {"role": "assistant", "content": content}}]})

        app = web.Application()
        app.router.add_post("/v1/chat/completions", answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        yield self.url
        await runner.cleanup()

    async def make_work(self, work_factory: WorkFactory, run: AgentRun) -> AgentWork:
        work = await super().make_work(work_factory, run)
        work.judges["model"] = JudgeSettings(url=self.url, model="judge")
        return work
