"""Sessions for tests of evaluators: real runtimes in which a script plays the agent."""

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
"""For graders that run pytest: loading this project's pytest plug-ins takes three quarters of the time, and no task
uses them."""

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
        self.fresh_runtimes: list[Runtime] = []
        self.scratch.mkdir()
        self.logs.mkdir()

    async def create_fresh_runtime(self) -> Runtime:
        if self.live:
            return self.agent_runtime
        runtime = await self._factory.start_runtime(self.task)
        steps = [*self.task.runtime.prepare, *(self.task.runtime.eval_prepare or [])]
        await run_prepare_steps(runtime, steps, log=self.logs / "eval_prepare.log")
        self.fresh_runtimes.append(runtime)
        return runtime


class WorkFactory:
    """Makes sessions to grade in runtimes of one backend. The caller closes the backend afterwards."""

    def __init__(self, backend: RuntimeBackend, folder: Path) -> None:
        self._backend = backend
        self._folder = folder

    async def start_runtime(self, task: TaskRequest) -> Runtime:
        request = task.runtime
        limits = Limits(request.cpus, request.memory_mb, request.processes, request.disk_mb)
        spec = RuntimeSpec(image=request.image, workdir=request.workdir, env=request.env, limits=limits, network="none")
        runtime = await self._backend.create(f"t{secrets.token_hex(8)}", spec)
        await runtime.start()
        return runtime

    async def create_work(
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
        agent_runtime = await self.start_runtime(request)
        await run_prepare_steps(agent_runtime, request.runtime.prepare, log=folder / "prepare.log")
        work = AgentWork(self, request, agent_runtime, folder)
        assert work.initial_workspace is not None
        await agent_runtime.get(request.runtime.workdir, work.initial_workspace)
        if agent:
            result = await agent_runtime.run(["sh", "-c", agent], output=folder / "agent.log")
            assert result.exit_code == 0, (folder / "agent.log").read_text()
        if not work.live:
            await agent_runtime.stop()
        return work
