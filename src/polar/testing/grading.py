"""What evaluators are given: real runtimes, in which a script plays the agent."""

import secrets
from pathlib import Path
from typing import Any

from polar.config import JudgeSettings
from polar.evaluators.base import Outcome
from polar.records.exchange import Exchange
from polar.records.session import Evidence
from polar.records.task import TaskRequest
from polar.runtimes.base import Limits, Runtime, RuntimeBackend, RuntimeSpec
from polar.runtimes.prepare_steps import run_prepare_steps

FINISHED = Outcome("finished", 0, 1.0)

WITHOUT_PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
"""For graders that run pytest: this project's plug-ins take three quarters of the time, and no task has them."""

WITH_PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": ""}


class AgentWork:
    """The GradingContext of one session, as a node would hand it over."""

    def __init__(self, factory: "WorkFactory", task: TaskRequest, agent: Runtime, folder: Path) -> None:
        self._factory = factory
        self.task = task
        self.session_id = agent.id
        self.outcome = FINISHED
        self.agent_runtime = agent
        self.live = task.evaluator is not None and not task.evaluator.refresh_runtime
        self.initial_workspace: Path | None = folder / "before"
        self.scratch = folder / "scratch"
        self.logs = folder / "logs"
        self.exchanges: list[Exchange] = []
        self.judges: dict[str, JudgeSettings] = {}
        self.answer = ""
        self.evidence: list[Evidence] = []
        self.freshly_made: list[Runtime] = []
        self.scratch.mkdir()
        self.logs.mkdir()

    async def create_fresh_runtime(self) -> Runtime:
        if self.live:
            return self.agent_runtime
        runtime = await self._factory.runtime(self.task)
        steps = [*self.task.runtime.prepare, *(self.task.runtime.eval_prepare or [])]
        await run_prepare_steps(runtime, steps, log=self.logs / "eval_prepare.log")
        self.freshly_made.append(runtime)
        return runtime


class WorkFactory:
    """Makes sessions to grade in runtimes of one backend. The caller closes the backend afterwards."""

    def __init__(self, backend: RuntimeBackend, folder: Path) -> None:
        self._backend = backend
        self._folder = folder

    async def runtime(self, task: TaskRequest) -> Runtime:
        wanted = task.runtime
        limits = Limits(wanted.cpus, wanted.memory_mb, wanted.processes, wanted.disk_mb)
        spec = RuntimeSpec(image=wanted.image, workdir=wanted.workdir, env=wanted.env, limits=limits, network="none")
        runtime = await self._backend.create(f"t{secrets.token_hex(8)}", spec)
        await runtime.start()
        return runtime

    async def work(
        self,
        agent: str = "",
        *,
        files: dict[str, str] | None = None,
        runtime: dict[str, Any] | None = None,
        evaluator: dict[str, Any] | None = None,
        **task: Any,
    ) -> AgentWork:
        """Runs the script `agent` over `files` (of the prepared workspace), and stops the runtime unless the
        evaluator's `refresh_runtime` is false. `runtime`, `evaluator` and `task` are fields of the TaskRequest."""
        steps = [{"type": "upload_file", "target": path, "content": text} for path, text in (files or {}).items()]
        runtime, evaluator = runtime or {}, evaluator or {}
        request = TaskRequest.model_validate(
            {
                "task_id": "task",
                "instruction": "Do it.",
                "evaluator": {
                    "strategy": "session_completed",
                    **evaluator,
                    "env": WITHOUT_PLUGINS | evaluator.get("env", {}),
                },
                "runtime": {"backend": "local", **runtime, "prepare": [*steps, *runtime.get("prepare", [])]},
                **task,
            }
        )
        folder = self._folder / secrets.token_hex(6)
        folder.mkdir()
        inside = await self.runtime(request)
        await run_prepare_steps(inside, request.runtime.prepare, log=folder / "prepare.log")
        work = AgentWork(self, request, inside, folder)
        assert work.initial_workspace is not None
        await inside.get(request.runtime.workdir, work.initial_workspace)
        if agent:
            done = await inside.run(["sh", "-c", agent], output=folder / "agent.log")
            assert done.exit_code == 0, (folder / "agent.log").read_text()
        if not work.live:
            await inside.stop()
        return work
