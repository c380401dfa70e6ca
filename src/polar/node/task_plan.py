"""Task plans: the plug-ins and recipes behind a task's names, resolved before its first session begins."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from typing import Any

from cachetools import LRUCache
from msgspec import Struct
from pydantic import ValidationError

from polar.config import NodeSettings, PrewarmSettings
from polar.errors import ConfigError
from polar.evaluators import load_evaluator
from polar.evaluators.base import Evaluator
from polar.harnesses import load_harness
from polar.harnesses.base import Harness
from polar.harnesses.cache import Installation, find_cache_folder, find_installation
from polar.node.probes import list_upload_targets
from polar.node.runtime_pool import RuntimeRecipe
from polar.plugins import load
from polar.records.task import AgentRequest, RuntimeRequest, Step, TaskRequest
from polar.rollout.protocol import Lease
from polar.runtimes import seccomp
from polar.runtimes.base import Limits, Mount, Network, RuntimeSpec


class TaskPlan(Struct):
    task: TaskRequest
    harness: Harness
    installed: Installation | None  # None: the runtime has the harness itself
    settings: dict[str, Any]  # the harness's
    model: str
    evaluator: Evaluator | None
    recipe: RuntimeRecipe  # of the agent's runtime
    grading_recipe: RuntimeRecipe  # of the evaluator's

    @property
    def private_paths(self) -> list[str]:
        """Paths in the runtime where the grader keeps files that the agent must not see."""
        runtime = self.task.runtime
        prepared = list_upload_targets(runtime.prepare)
        graders = [*getattr(self.evaluator, "private_paths", ()), *list_upload_targets(runtime.eval_prepare or [])]
        return [path for path in graders if path not in prepared]

    @property
    def wants_fresh_runtime(self) -> bool:
        request = self.task.evaluator
        return (
            self.evaluator is not None
            and self.evaluator.needs_fresh_runtime
            and request is not None
            and (request.refresh_runtime)
        )


def make_plan(task: TaskRequest, settings: NodeSettings) -> TaskPlan:
    """Raises ConfigError, which names the field that can't be honoured."""
    agent, runtime = task.agent, task.runtime
    if runtime.gpus:
        raise ConfigError("runtime.gpus: runtimes have no GPUs here.")
    harness = load_harness(agent.preset)
    if agent.mcp_servers and not harness.supports_mcp:
        raise ConfigError(f"agent.mcp_servers: {harness.name} takes none.")
    if agent.skills_path is not None and harness.skills_folder is None:
        raise ConfigError(f"agent.skills_path: {harness.name} has no skills.")
    installed = find_installation(find_cache_folder(settings.harness_cache), harness, agent.version)
    shell = agent.custom_shell
    options = agent.settings | ({} if shell is None else {"command": shell.command})
    program = harness.build_command(task.instruction, options)[0]  # also validates the settings
    # An image may contain the harness in an unknown version; without an image, only this machine's PATH can.
    elsewhere = runtime.image is not None or "PATH" in runtime.env | agent.env or shutil.which(program) is not None
    if installed is None and (agent.version is not None or (harness.package is not None and not elsewhere)):
        raise _make_not_installed_error(agent.harness)
    load("builders", task.builder.strategy)
    grading_network: Network = "internet" if runtime.effective_network == "internet" else "none"
    return TaskPlan(
        task=task,
        harness=harness,
        installed=installed,
        settings=options,
        model=agent.model_name or harness.default_model,
        evaluator=None if task.evaluator is None else load_evaluator(task.evaluator),
        recipe=make_agent_recipe(runtime, installed, settings),
        grading_recipe=RuntimeRecipe(
            runtime.backend,
            _make_runtime_spec(runtime, grading_network, (), settings),
            _list_grading_steps(task),
        ),
    )


def _list_grading_steps(task: TaskRequest) -> tuple[Step, ...]:
    prepare, for_evaluator = task.runtime.prepare, task.runtime.eval_prepare
    if task.semantics.eval_prepare == "replace" and for_evaluator is not None:
        return tuple(for_evaluator)
    return (*prepare, *(for_evaluator or ()))


def make_agent_recipe(runtime: RuntimeRequest, installed: Installation | None, settings: NodeSettings) -> RuntimeRecipe:
    """The recipe of an agent's runtime."""
    mounts = () if installed is None else (installed.mount(),)
    spec = _make_runtime_spec(runtime, runtime.effective_network, mounts, settings)
    return RuntimeRecipe(runtime.backend, spec, tuple(runtime.prepare))


def make_prewarm_recipe(prewarm: PrewarmSettings, settings: NodeSettings) -> RuntimeRecipe:
    """The recipe of a runtime that the operator wants kept ready. Raises ConfigError."""
    installed = None
    if prewarm.harness is not None:
        agent = AgentRequest(harness=prewarm.harness)
        installed = find_installation(
            find_cache_folder(settings.harness_cache), load_harness(agent.preset), agent.version
        )
        if installed is None:
            raise _make_not_installed_error(prewarm.harness)
    try:
        runtime = RuntimeRequest.model_validate(prewarm.runtime)
    except ValidationError as error:
        raise ConfigError(f"[[node.prewarm]]: {error.errors()[0]['loc']}: {error.errors()[0]['msg']}.") from error
    return make_agent_recipe(runtime, installed, settings)


def _make_not_installed_error(harness: str) -> ConfigError:
    return ConfigError(f"{harness} is not installed: run `polar harness install {harness}`.")


def _make_runtime_spec(
    runtime: RuntimeRequest, network: Network, mounts: tuple[Mount, ...], settings: NodeSettings
) -> RuntimeSpec:
    limits = Limits(runtime.cpus, runtime.memory_mb, runtime.processes, runtime.disk_mb or settings.disk_mb)
    filtered = runtime.seccomp if isinstance(runtime.seccomp, bool) else tuple(sorted(set(runtime.seccomp)))
    if not isinstance(filtered, bool):
        seccomp.parse_allowances(filtered)  # raises for unknown names
    return RuntimeSpec(
        image=runtime.image,
        workdir=runtime.workdir,
        env=runtime.env,
        limits=limits,
        network=network,
        mounts=mounts,
        seccomp=filtered,
    )


_MAX_PLANS = 256


class PlanCache:
    """Plans of the tasks that this node leases. Samples of a task share one plan."""

    def __init__(self, plan: Callable[[TaskRequest], Awaitable[TaskPlan]]) -> None:
        self._plan = plan
        self._plans: LRUCache[str, asyncio.Future[TaskPlan]] = LRUCache(_MAX_PLANS)

    async def get(self, lease: Lease) -> TaskPlan:
        """Raises ConfigError where the task can't be run here."""
        planning = self._plans.get(lease.digest)
        if planning is None:
            try:
                task = TaskRequest.model_validate_json(bytes(lease.request))
            except ValidationError as error:
                raise ConfigError(f"This node can't read the task; is it older than the server? {error}") from error
            planning = self._plans[lease.digest] = asyncio.ensure_future(self._plan(task))
        try:
            return await asyncio.shield(planning)
        except Exception:
            self._plans.pop(lease.digest, None)  # the cause may be gone the next time
            raise
