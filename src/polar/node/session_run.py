"""One session, from its runtime to its verdict.

    INIT      takes a warm runtime or makes one, and puts the harness's files into it
    READY     waits for a run slot
    RUN       runs the harness until it exits or its budget is used up
    POSTRUN   kills every process of the agent, keeps its logs and diff, and evaluates its work

Every session ends with a verdict and leaves nothing on the machine. A failure of the platform is a reason without a
reward; what the agent causes is graded.
"""

import asyncio
import logging
import posixpath
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from polar import ids
from polar.config import Settings
from polar.errors import PolarError, StoreError
from polar.evaluators.base import GraderError, Outcome
from polar.evaluators.changes import find_changes
from polar.evaluators.patches import make_patch
from polar.gateway.meter import Meter
from polar.gateway.session_registry import SessionRegistry
from polar.harnesses import build_environment
from polar.harnesses.base import SetupRequest
from polar.node.finished_session import FinishedSession, SessionFolder, check_verdict, to_document, to_printable
from polar.node.grading import GradingWork, apply_policy, bound_evidence, find_main_calls
from polar.node.probes import GraderPathProbes
from polar.node.runtime_pool import MAX_WORKSPACE_BYTES, WarmPool, WorkspaceSnapshots
from polar.node.stages import Stage, StageName, StageTiming
from polar.node.task_plan import TaskPlan
from polar.records.exchange import Exchange
from polar.records.session import Evidence, Session, Verdict
from polar.runtimes.base import CommandResult, CorruptedRuntimeError, Runtime, SandboxError, TransferTooLargeError
from polar.runtimes.prepare_steps import PrepareError
from polar.runtimes.state_folder import remove_tree
from polar.store.base import Store
from polar.telemetry import tracing
from polar.telemetry.logs import bind

log = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_LOG_BYTES = 32 << 20  # of each log path of a harness
_EXIT_COMMAND_NOT_FOUND = 127
_MAX_ERROR_CHARS = 2000  # of an error that is kept


class HarnessError(PolarError):
    """The harness ended without a model call."""


class NonzeroExit(PolarError):
    """The harness exited non-zero, and the task masks such sessions."""


class TimeLimitReached(PolarError):
    """The session ran out of time before its harness began or its grader ended."""


class EngineFailure(PolarError):
    """The harness's last call failed in the engine or the gateway."""


class NodeContext(Struct, frozen=True):
    """What all sessions of a node share."""

    settings: Settings
    data: Path
    node_id: str
    store: Store
    sessions: SessionRegistry
    warm_pool: WarmPool
    snapshots: WorkspaceSnapshots
    init: Stage
    ready: Stage
    run: Stage
    postrun: Stage


class _Launch(Struct, frozen=True):
    """How the harness is started."""

    argv: list[str]
    env: dict[str, str]
    cwd: str


_REASONS: tuple[tuple[type[BaseException], str], ...] = (
    (PrepareError, "prepare_failed"),
    (HarnessError, "harness_failed"),
    (NonzeroExit, "nonzero_exit"),
    (TimeLimitReached, "timeout"),
    (EngineFailure, "engine_failed"),
    (GraderError, "grader_failed"),
    (SandboxError, "sandbox_failed"),
    (StoreError, "store_failed"),
)


class SessionRun:
    def __init__(
        self, plan: TaskPlan, sample: int, context: NodeContext, session: Session, key: str, scratch: Path
    ) -> None:
        self.plan = plan
        self.sample = sample
        self.session_id = session.session_id
        self.stage: StageName | None = None  # None while it waits for its first stage
        self.is_recorded = False  # the store has its verdict
        self._has_begun = False
        self._may_cancel = True
        self._context = context
        self._session = session
        self._key = key
        self._scratch = scratch
        self._folder = SessionFolder(context.data, session.session_id)
        self._timing = StageTiming()
        self._runtime: Runtime | None = None
        self._launch: _Launch | None = None
        self._grading_work: GradingWork | None = None
        self._snapshot: Path | None = None
        self._has_snapshot = False
        self._expects_grading_runtime = False  # the warm pool was asked to have a runtime ready for the grader
        self._outcome: Outcome | None = None
        self._evidence: list[Evidence] = []
        self._versions: tuple[int, int] | None = None
        self._span = tracing.SessionSpan()
        self.meter: Meter

    @classmethod
    async def create(
        cls,
        plan: TaskPlan,
        sample: int,
        context: NodeContext,
        scratch: Callable[[str], Path],
        work_id: int | None = None,
    ) -> "SessionRun":
        """Creates the session in the store, in its scratch folder first."""
        task = plan.task
        meter = Meter(max_turns=task.budget.turns, max_tokens=task.budget.tokens)
        metadata = {
            **task.metadata,
            "task_id": task.task_id,
            "sample": sample,
            "harness": plan.harness.name,
            "model": plan.model,
            "node_id": context.node_id,
            **({} if work_id is None else {"work_id": work_id}),
        }
        # The folder comes first: by it the next node finds a session that this one left unrecorded.
        folder = scratch(session_id := ids.new_session_id())
        try:
            session, key = await context.sessions.create(
                metadata, task.run, session_id=session_id, meter=meter, sampling=task.sampling
            )
        except StoreError:
            await asyncio.to_thread(remove_tree, folder)
            raise
        session_run = cls(plan, sample, context, session, key, folder)
        session_run.meter = meter
        return session_run

    async def run(self) -> FinishedSession:
        """Never raises: every failure becomes a verdict. Cancellation has no effect once there is a verdict."""
        error: str | None = None
        self._has_begun = True
        self._bind_telemetry()
        try:
            if not self._may_cancel:
                raise asyncio.CancelledError
            self._folder.create()
            verdict = await self._run_stages()
        except asyncio.CancelledError:
            verdict = Verdict(reason="cancelled")
        except PolarError as failure:
            reason = next((reason for kind, reason in _REASONS if isinstance(failure, kind)), "node_failed")
            error = to_printable(str(failure)[:_MAX_ERROR_CHARS])
            verdict = Verdict(reason=reason)
        except Exception as failure:
            log.exception("session %s failed", self.session_id)
            error = to_printable(f"{type(failure).__name__}: {failure}"[:_MAX_ERROR_CHARS])
            verdict = Verdict(reason="node_failed")
        self._may_cancel = False
        self._span.enter_stage(None)
        verdict = msgspec.structs.replace(verdict, evidence=bound_evidence(self._evidence))
        if verdict.reason != "cancelled":
            adjusted = apply_policy(verdict, self.plan.task.suspicious)
            if error is not None and adjusted is not verdict:  # tampering decides, not the error
                adjusted.detail["unadjusted_error"], error = error, None
            verdict = adjusted
        await self._tear_down()
        finished = FinishedSession(
            self.session_id,
            self.plan.task.task_id,
            self.sample,
            verdict,
            self._timing.seconds,
            self._folder.path,
            self._outcome,
            self.meter.turns,
            self.meter.tokens,
            error,
            self._versions,
        )
        self.is_recorded = await self._record_verdict(finished)
        self._span.end(finished.verdict, turns=finished.turns, tokens=finished.tokens)
        log.info("session %s has ended: %s", self.session_id, finished.verdict.reason or finished.verdict.reward)
        if self.is_recorded:
            await self._remove_scratch()
        return finished

    def cancel(self, task: "asyncio.Task[FinishedSession]") -> bool:
        if not self._may_cancel:
            return False
        self._may_cancel = False
        if self._has_begun:
            task.cancel()  # a task cancelled before its first step would never run; `run` checks `_may_cancel` instead
        return True

    def _bind_telemetry(self) -> None:
        """Binds the session's ids to log records and starts its tracing span."""
        task, node_id = self.plan.task, self._context.node_id
        bind(session_id=self.session_id, task_id=task.task_id, run=task.run, node_id=node_id)
        self._span = tracing.current().start_session(
            tracing.SessionAttributes(
                session_id=self.session_id,
                task_id=task.task_id,
                sample=self.sample,
                run=task.run,
                node_id=node_id,
                agent=self.plan.harness.name,
                model=self.plan.model,
            )
        )

    def _enter_stage(self, stage: StageName) -> None:
        self.stage = stage
        self._span.enter_stage(stage)
        log.debug("session %s is in %s", self.session_id, stage)

    async def _run_stages(self) -> Verdict:
        context, timing, priority = self._context, self._timing, self.plan.task.dispatch_priority
        async with context.init.slot(priority):
            timing.record("queued")
            self._enter_stage("init")
            if self.plan.task.semantics.clock == "init":
                self.meter.clock.start()
            await self._run_within_time(self._prepare(), "The runtime was not ready")
            timing.record("init")
            await context.ready.enter(priority)
        try:
            self._enter_stage("ready")
            await context.run.enter(priority)
        finally:
            context.ready.leave()
            timing.record("ready")
        try:
            self._enter_stage("run")
            outcome = await self._run_harness()
        finally:
            context.run.leave()
            timing.record("run")
        self._enter_stage("postrun")  # or waiting for it
        await self._stop_agent()
        async with context.postrun.slot(priority):
            timing.record("waiting")
            try:
                return await self._postrun(outcome)
            finally:
                timing.record("postrun")

    async def _run_within_time(self, work: Coroutine[Any, Any, T], what: str) -> T:
        """Raises TimeLimitReached where the task's time limit covers this work and has passed."""
        if self.plan.task.semantics.clock == "run":
            return await work
        seconds = self.plan.task.timeout_seconds
        running, limit = asyncio.ensure_future(work), asyncio.ensure_future(self.meter.wait_for_timeout(seconds))
        try:
            await asyncio.wait({running, limit}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                raise TimeLimitReached(f"{what} within {seconds:g} seconds.")
            return running.result()
        finally:
            for task in (running, limit):
                task.cancel()
            await asyncio.wait({running, limit})

    # INIT

    async def _prepare(self) -> None:
        plan, context = self.plan, self._context
        runtime = self._runtime = await context.warm_pool.take(plan.recipe)
        self._snapshot = await context.snapshots.acquire(plan.recipe, runtime)
        self._has_snapshot = True
        agent, home = plan.task.agent, runtime.spec.home
        request = SetupRequest(
            home=runtime.path(home),
            workdir=runtime.path(runtime.spec.workdir),
            gateway_url=runtime.gateway_url(),
            key=self._key,
            model=plan.model,
            mcp_servers=tuple(agent.mcp_servers),
            settings=plan.settings,
        )
        setup = plan.harness.setup(request)
        for path, content in setup.files.items():
            await runtime.put(content.encode(), f"{home}/{path}")
        if agent.skills_path is not None and plan.harness.skills_folder is not None:
            await runtime.put(Path(agent.skills_path), f"{home}/{plan.harness.skills_folder}")
        shell = agent.custom_shell
        env = {
            **build_environment(request.gateway_url, self._key, plan.model),
            **await self._make_folders(runtime),
            **setup.env,
            **agent.env,
            **({} if shell is None else shell.env),
        }
        argv = plan.harness.build_command(plan.task.instruction, plan.settings)
        if plan.installed is not None:
            argv[0] = runtime.path(plan.installed.program_path())
        cwd = posixpath.join(runtime.spec.workdir, (shell and shell.cwd) or "")
        self._launch = _Launch(argv, env, cwd)

    async def _make_folders(self, runtime: Runtime) -> dict[str, str]:
        """Makes the session's folders in the runtime; returns the variables that name them."""
        folders = self._scratch / "session"
        await asyncio.to_thread(_make_session_folders, folders)
        inside = f"{runtime.spec.home}/.session"
        await runtime.put(folders, inside)
        await asyncio.to_thread(remove_tree, folders)
        return {
            "SESSION_ID": self.session_id,
            "TASK_ID": self.plan.task.task_id,
            "SESSION_DIR": runtime.path(inside),
            "ARTIFACTS_DIR": runtime.path(f"{inside}/artifacts"),
            "LOGS_DIR": runtime.path(f"{inside}/logs"),
            "AGENT_LOG_DIR": runtime.path(f"{inside}/logs/agent"),
        }

    # RUN

    async def _run_harness(self) -> Outcome:
        runtime, launch, context = self._runtime, self._launch, self._context
        assert runtime is not None
        assert launch is not None
        if self.plan.wants_fresh_runtime:
            context.warm_pool.expect(self.plan.grading_recipe)
            self._expects_grading_runtime = True
        clock = self.meter.clock
        clock.start()
        started = time.monotonic()
        harness_run = asyncio.ensure_future(
            runtime.run(launch.argv, env=launch.env, cwd=launch.cwd, output=self._folder.agent_log)
        )
        limit = asyncio.ensure_future(self.meter.wait_until_used_up(self.plan.task.timeout_seconds))
        completed: CommandResult | None = None
        try:
            await asyncio.wait({harness_run, limit}, return_when=asyncio.FIRST_COMPLETED)
            if harness_run.done():
                completed = harness_run.result()
        finally:
            for task in (harness_run, limit):
                task.cancel()
            await asyncio.wait({harness_run, limit})
            # The session key stops working, and calls that are still running are recorded.
            await context.sessions.end(self.session_id)
        seconds = time.monotonic() - started
        if completed is not None:
            self._outcome = Outcome("finished", completed.exit_code, seconds, completed.out_of_memory)
        else:
            self._outcome = Outcome(limit.result(), None, seconds)
        return self._outcome

    async def _stop_agent(self) -> None:
        """Stops every process of the agent before POSTRUN is entered: a daemon must not change the files that are
        graded."""
        assert self._runtime is not None
        if self.plan.task.evaluator is None or self.plan.task.evaluator.refresh_runtime:
            await self._runtime.stop()

    # POSTRUN

    async def _postrun(self, outcome: Outcome) -> Verdict:
        runtime, task = self._runtime, self.plan.task
        assert runtime is not None
        await self._keep_logs(runtime)
        exchanges = [exchange async for exchange in self._context.store.read_exchanges(self.session_id)]
        self._versions = _find_version_range(exchanges)
        calls = await asyncio.to_thread(find_main_calls, self._session, exchanges)
        last = calls[-1] if calls else None
        self._check_platform(outcome, last)
        if outcome.end_reason == "finished" and outcome.exit_code != 0 and task.semantics.on_failed_exit == "mask":
            ending = "was killed" if outcome.exit_code is None else f"ended with {outcome.exit_code}"
            raise NonzeroExit(f"The harness {ending}.")
        outcome = self._outcome = self._apply_length_limit(outcome, last)
        patch = await self._keep_diff(runtime)
        self._evidence += await asyncio.to_thread(self._find_probes, exchanges, patch)
        if outcome.end_reason != "finished":
            policy = task.on_timeout if outcome.end_reason == "timeout" else task.on_length
            if policy == "mask":
                return Verdict(reason=outcome.end_reason)
            if policy == "zero":
                return Verdict(0.0, detail={"why": f"The session reached its limit ({outcome.end_reason})."})
        if self.plan.evaluator is None:
            return Verdict()
        self._grading_work = GradingWork(
            self.plan,
            self._session,
            exchanges,
            calls,
            outcome,
            runtime,
            warm_pool=self._context.warm_pool,
            before=self._snapshot,
            scratch=self._scratch,
            logs=self._folder.logs,
            judges=self._context.settings.judges,
            expects_runtime=self._expects_grading_runtime,
            evidence=self._evidence,
        )
        self._expects_grading_runtime = False
        try:
            verdict = await self._run_within_time(
                self.plan.evaluator.evaluate(self._grading_work), "The session was not graded"
            )
        except CorruptedRuntimeError as error:
            verdict = Verdict(0.0, detail={"why": str(error)})
        self._evidence += verdict.evidence
        if not verdict.reward and self._grading_work.timed_out and task.semantics.on_grader_timeout == "mask":
            verdict = Verdict(reason="timeout_grading", detail=verdict.detail)
        return check_verdict(verdict, in_live_runtime=self._grading_work.live)

    def _find_probes(self, exchanges: list[Exchange], patch: bytes) -> list[Evidence]:
        """Evidence that the agent looked for the grader's files."""
        probes = GraderPathProbes(
            self.plan.private_paths, workdir=self.plan.task.runtime.workdir, workspace=self._snapshot
        )
        probes.mark_shown(self.plan.task.instruction)
        probes.read_exchanges(exchanges)
        probes.read_patch(patch)
        return probes.evidence

    def _check_platform(self, outcome: Outcome, last: Exchange | None) -> None:
        """Raises where the platform is to blame: the last call failed in the engine or the gateway, or the harness
        ended without any call, so that the agent never saw the task."""
        platform_failure = self.meter.recording_error or (last and self.meter.find_platform_failure(last.exchange_id))
        if platform_failure is not None:
            raise EngineFailure(platform_failure)
        failed = outcome.end_reason == "finished" and outcome.exit_code != 0
        if self.meter.turns == 0 and (failed or self.plan.harness.package is not None):
            raise HarnessError(self._explain_silence(outcome))

    def _explain_silence(self, outcome: Outcome) -> str:
        name = self.plan.harness.name
        if outcome.exit_code == _EXIT_COMMAND_NOT_FOUND and self.plan.installed is None and self.plan.harness.package:
            return f"{name} is not in the runtime: run `polar harness install {name}`."
        if outcome.out_of_memory:
            return f"{name} ran out of memory before its first model call: raise runtime.memory_mb."
        ending = f"ended with {outcome.exit_code}" if outcome.end_reason == "finished" else "used up its time"
        return f"{name} {ending} before its first model call: {self._folder.read_log_tail() or 'it printed nothing'}"

    def _apply_length_limit(self, outcome: Outcome, last: Exchange | None) -> Outcome:
        """Marks a harness that exited by itself as ended by `length` where its last reply was truncated or the context
        was full."""
        was_truncated = self.meter.has_unrecorded_long_call or (
            last is not None and (last.finish_reason == "length" or self.meter.exceeded_context(last.exchange_id))
        )
        return (
            msgspec.structs.replace(outcome, end_reason="length")
            if outcome.end_reason == "finished" and was_truncated
            else outcome
        )

    async def _keep_logs(self, runtime: Runtime) -> None:
        for path in self.plan.harness.log_paths:
            try:
                await runtime.get(
                    f"{runtime.spec.home}/{path}", self._folder.logs / path.strip("."), max_bytes=_MAX_LOG_BYTES
                )
            except FileNotFoundError:
                continue
            except (TransferTooLargeError, OSError) as error:
                log.warning("session %s: the harness's log %s can't be kept: %s", self.session_id, path, error)

    async def _keep_diff(self, runtime: Runtime) -> bytes:
        """Writes the agent's changes to its workspace as a patch and returns it; empty where there is no snapshot."""
        if self._snapshot is None:
            return b""
        after = self._scratch / "after"
        try:
            await runtime.get(runtime.spec.workdir, after, max_bytes=MAX_WORKSPACE_BYTES, all_links=True)
            patch = await asyncio.to_thread(_make_patch, self._snapshot, after)
        except (TransferTooLargeError, OSError) as error:  # the diff is only for reading; the evaluator decides
            why = str(error)[:_MAX_ERROR_CHARS].encode(errors="backslashreplace")
            self._folder.workspace_diff.write_bytes(b"# The workspace could not be copied: " + why + b"\n")
            return b""
        self._folder.workspace_diff.write_bytes(patch)
        await asyncio.to_thread(remove_tree, after)
        return patch

    # The end

    async def _tear_down(self) -> None:
        """Removes the session's runtimes and snapshot. `cancel` has no effect any more."""
        runtimes = [] if self._grading_work is None else list(self._grading_work.fresh_runtimes)
        if self._runtime is not None:
            runtimes.append(self._runtime)
        results = await asyncio.gather(*(runtime.remove() for runtime in runtimes), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):  # the next sweep removes it
                log.error("session %s: a runtime could not be removed: %s", self.session_id, result)
        if self._expects_grading_runtime or (self._grading_work is not None and self._grading_work.expects_runtime):
            self._context.warm_pool.cancel_expected(self.plan.grading_recipe)
        if self._has_snapshot:
            try:
                await self._context.snapshots.release(self.plan.recipe)
            except SandboxError as error:
                log.error("session %s: %s", self.session_id, error)

    async def _remove_scratch(self) -> None:
        """The scratch folder marks a session without a recorded verdict, so it is removed last."""
        try:
            await asyncio.to_thread(remove_tree, self._scratch)
        except SandboxError as error:
            log.error("session %s: %s", self.session_id, error)

    async def _record_verdict(self, finished: FinishedSession) -> bool:
        """Writes the verdict to the store, then to the session's folder. Returns whether the store has it."""
        is_recorded = True
        try:
            await self._context.sessions.end(self.session_id, finished.verdict)
        except StoreError as error:
            is_recorded = False
            finished.verdict = Verdict(reason="store_failed")
            finished.error = str(error)
        try:
            self._folder.write_json("timing.json", {"began_at": self._timing.began_at, "seconds": finished.seconds})
            self._folder.write_json("verdict.json", to_document(finished))
        except OSError as error:
            log.error("session %s: %s can't be written: %s", self.session_id, self._folder.path, error)
        return is_recorded


def _make_session_folders(folder: Path) -> None:
    for name in ("artifacts", "logs/agent"):
        (folder / name).mkdir(parents=True)


def _find_version_range(exchanges: list[Exchange]) -> tuple[int, int] | None:
    versions = [span.version for exchange in exchanges for span in exchange.versions]
    return (min(versions), max(versions)) if versions else None


def _make_patch(before: Path, after: Path) -> bytes:
    return make_patch(before, after, find_changes(before, after)).text
