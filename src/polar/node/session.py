"""One session, from its runtime to its verdict.

    INIT      a runtime is taken or made, and the harness's files are put into it
    READY     it waits, warm, for a run slot
    RUN       the harness runs, until it ends or has used up what it may
    POSTRUN   every process of it dies; what it left is taken, evaluated, and told

Whatever happens, there is a verdict in the end, and nothing of the session's is left on the machine. A failure of the
platform is a reason; what the agent brings about is graded.
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
from polar.changes import changes
from polar.config import Settings
from polar.errors import PolarError, StoreError
from polar.evaluators.base import GraderError, Outcome
from polar.gateway.meter import Meter
from polar.gateway.sessions import Sessions
from polar.harnesses import environment
from polar.harnesses.base import Wanted
from polar.node.before import MOST, Before
from polar.node.finished import Finished, checked, printable, shown
from polar.node.folder import Folder
from polar.node.plan import Plan
from polar.node.probes import GraderPathProbes
from polar.node.stages import Stage, StageName, Timing
from polar.node.tamper_policy import apply_policy, bound_evidence
from polar.node.warm import Warm
from polar.node.work import Graded, main_calls
from polar.patches import patch
from polar.runtimes.base import Completed, Runtime, SandboxError, Spoiled, TooLarge
from polar.runtimes.preparing import PrepareError
from polar.runtimes.state import remove_tree
from polar.store.base import Evidence, Exchange, Session, Store, Verdict
from polar.telemetry import tracing
from polar.telemetry.logs import bind

log = logging.getLogger(__name__)

T = TypeVar("T")

_LOGS = 32 << 20  # bytes of each thing that a harness wrote of its own run
_NOT_THERE = 127
_TOLD = 2000  # characters of an error that are kept
_LISTED = 1000  # of what a verdict lists


class HarnessError(PolarError):
    """The harness could not even begin: no model call was made."""


class NonzeroExit(PolarError):
    """The harness exited non-zero, and its task does not have such sessions graded."""


class TimeUsedUp(PolarError):
    """The session's time was over before the harness began, or before its grader had ended."""


class EngineFailed(PolarError):
    """The harness ended on a call that the engine, or we, could not answer."""


class Place(Struct, frozen=True):
    """What all sessions of a node share."""

    settings: Settings
    data: Path
    node_id: str
    store: Store
    sessions: Sessions
    warm: Warm
    before: Before
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
    (TimeUsedUp, "timeout"),
    (EngineFailed, "engine_failed"),
    (GraderError, "grader_failed"),
    (SandboxError, "sandbox_failed"),
    (StoreError, "store_failed"),
)


class Life:
    def __init__(self, plan: Plan, sample: int, place: Place, session: Session, key: str, scratch: Path) -> None:
        self.plan = plan
        self.sample = sample
        self.session_id = session.session_id
        self.stage: StageName | None = None  # None while it waits for the first
        self.told = False  # the store knows its verdict
        self._begun = False
        self._may_cancel = True
        self._place = place
        self._session = session
        self._key = key
        self._scratch = scratch
        self._folder = Folder(place.data, session.session_id)
        self._timing = Timing()
        self._runtime: Runtime | None = None
        self._launch: _Launch | None = None
        self._work: Graded | None = None
        self._before: Path | None = None
        self._has_before = False
        self._expected = False  # of the warm ones, a runtime for our grader
        self._outcome: Outcome | None = None
        self._evidence: list[Evidence] = []
        self._versions: tuple[int, int] | None = None
        self._span = tracing.SessionSpan()
        self.meter: Meter

    @classmethod
    async def begin(
        cls, plan: Plan, sample: int, place: Place, scratch: Callable[[str], Path], work_id: int | None = None
    ) -> "Life":
        """The session is in the store from here on."""
        task = plan.task
        meter = Meter(turns=task.budget.turns, tokens=task.budget.tokens)
        metadata = {
            **task.metadata,
            "task_id": task.task_id,
            "sample": sample,
            "harness": plan.harness.name,
            "model": plan.model,
            "node_id": place.node_id,
            **({} if work_id is None else {"work_id": work_id}),
        }
        # The folder first: by it the next node knows of a session that this one did not tell of.
        folder = scratch(session_id := ids.new_session_id())
        try:
            session, key = await place.sessions.create(
                metadata, task.run, session_id=session_id, meter=meter, sampling=task.sampling
            )
        except StoreError:
            await asyncio.to_thread(remove_tree, folder)
            raise
        life = cls(plan, sample, place, session, key, folder)
        life.meter = meter
        return life

    async def live(self) -> Finished:
        """Never raises: what goes wrong is in the verdict. A cancellation counts until the verdict is being told."""
        error: str | None = None
        self._begun = True
        self._watch()
        try:
            if not self._may_cancel:
                raise asyncio.CancelledError
            self._folder.make()
            verdict = await self._through_the_stages()
        except asyncio.CancelledError:
            verdict = Verdict(reason="cancelled")
        except PolarError as failure:
            reason = next((reason for kind, reason in _REASONS if isinstance(failure, kind)), "node_failed")
            error = printable(str(failure)[:_TOLD])
            verdict = Verdict(reason=reason)
        except Exception as failure:
            log.exception("session %s failed", self.session_id)
            error = printable(f"{type(failure).__name__}: {failure}"[:_TOLD])
            verdict = Verdict(reason="node_failed")
        self._may_cancel = False
        self._span.stage(None)
        verdict = msgspec.structs.replace(verdict, evidence=bound_evidence(self._evidence))
        if verdict.reason != "cancelled":
            settled = apply_policy(verdict, self.plan.task.suspicious)
            if error is not None and settled is not verdict:  # what went wrong decides nothing any more
                settled.detail["unadjusted_error"], error = error, None
            verdict = settled
        await self._tear_down()
        finished = Finished(
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
        self.told = await self._told(finished)
        self._span.end(finished.verdict, turns=finished.turns, tokens=finished.tokens)
        log.info("session %s has ended: %s", self.session_id, finished.verdict.reason or finished.verdict.reward)
        if self.told:
            await self._forget()
        return finished

    def cancel(self, task: "asyncio.Task[Finished]") -> bool:
        if not self._may_cancel:
            return False
        self._may_cancel = False
        if self._begun:
            task.cancel()  # one that has not begun finds out by itself; cancelled before, it would never end
        return True

    def _watch(self) -> None:
        """What is logged from here on says whose it is, and whoever collects traces sees the session."""
        task, node_id = self.plan.task, self._place.node_id
        bind(session_id=self.session_id, task_id=task.task_id, run=task.run, node_id=node_id)
        self._span = tracing.current().session(
            tracing.Traced(
                session_id=self.session_id,
                task_id=task.task_id,
                sample=self.sample,
                run=task.run,
                node_id=node_id,
                agent=self.plan.harness.name,
                model=self.plan.model,
            )
        )

    def _enter(self, stage: StageName) -> None:
        self.stage = stage
        self._span.stage(stage)
        log.debug("session %s is in %s", self.session_id, stage)

    async def _through_the_stages(self) -> Verdict:
        place, timing, priority = self._place, self._timing, self.plan.task.dispatch_priority
        async with place.init.place(priority):
            timing.ended("queued")
            self._enter("init")
            if self.plan.task.semantics.clock == "init":
                self.meter.clock.start()
            await self._within_time(self._init(), "It was not ready to run")
            timing.ended("init")
            await place.ready.enter(priority)
        try:
            self._enter("ready")
            await place.run.enter(priority)
        finally:
            place.ready.leave()
            timing.ended("ready")
        try:
            self._enter("run")
            outcome = await self._run()
        finally:
            place.run.leave()
            timing.ended("run")
        self._enter("postrun")  # or waiting for it
        await self._stop_agent()
        async with place.postrun.place(priority):
            timing.ended("waiting")
            try:
                return await self._postrun(outcome)
            finally:
                timing.ended("postrun")

    async def _within_time(self, work: Coroutine[Any, Any, T], what: str) -> T:
        """Raises TimeUsedUp where the task's time covers this work too, and is over."""
        if self.plan.task.semantics.clock == "run":
            return await work
        seconds = self.plan.task.timeout_seconds
        working, limit = asyncio.ensure_future(work), asyncio.ensure_future(self.meter.time_over(seconds))
        try:
            await asyncio.wait({working, limit}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise TimeUsedUp(f"{what} within {seconds:g} seconds.")
            return working.result()
        finally:
            for task in (working, limit):
                task.cancel()
            await asyncio.wait({working, limit})

    # INIT

    async def _init(self) -> None:
        plan, place = self.plan, self._place
        runtime = self._runtime = await place.warm.take(plan.recipe)
        self._before = await place.before.take(plan.recipe, runtime)
        self._has_before = True
        agent, home = plan.task.agent, runtime.spec.home
        wanted = Wanted(
            home=runtime.path(home),
            workdir=runtime.path(runtime.spec.workdir),
            gateway_url=runtime.gateway_url(),
            key=self._key,
            model=plan.model,
            mcp_servers=tuple(agent.mcp_servers),
            settings=plan.settings,
        )
        setup = plan.harness.setup(wanted)
        for path, content in setup.files.items():
            await runtime.put(content.encode(), f"{home}/{path}")
        if agent.skills_path is not None and plan.harness.skills is not None:
            await runtime.put(Path(agent.skills_path), f"{home}/{plan.harness.skills}")
        shell = agent.custom_shell
        env = {
            **environment(wanted.gateway_url, self._key, plan.model),
            **await self._make_folders(runtime),
            **setup.env,
            **agent.env,
            **({} if shell is None else shell.env),
        }
        argv = plan.harness.command(plan.task.instruction, plan.settings)
        if plan.installed is not None:
            argv[0] = runtime.path(plan.installed.program())
        cwd = posixpath.join(runtime.spec.workdir, (shell and shell.cwd) or "")
        self._launch = _Launch(argv, env, cwd)

    async def _make_folders(self, runtime: Runtime) -> dict[str, str]:
        """Folders for what an agent writes of its session, and variables that name them."""
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

    async def _run(self) -> Outcome:
        runtime, launch, place = self._runtime, self._launch, self._place
        assert runtime is not None
        assert launch is not None
        if self.plan.wants_fresh:
            place.warm.expect(self.plan.grading)
            self._expected = True
        clock = self.meter.clock
        clock.start()
        began = time.monotonic()
        running = asyncio.ensure_future(
            runtime.run(launch.argv, env=launch.env, cwd=launch.cwd, output=self._folder.agent_log)
        )
        limit = asyncio.ensure_future(self.meter.used_up(self.plan.task.timeout_seconds))
        done: Completed | None = None
        try:
            await asyncio.wait({running, limit}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                done = running.result()
        finally:
            for task in (running, limit):
                task.cancel()
            await asyncio.wait({running, limit})
            # The key dies with the run, and what still runs of the session's calls is recorded.
            await place.sessions.end(self.session_id)
        seconds = time.monotonic() - began
        if done is not None:
            self._outcome = Outcome("finished", done.exit_code, seconds, done.out_of_memory)
        else:
            self._outcome = Outcome(limit.result(), None, seconds)
        return self._outcome

    async def _stop_agent(self) -> None:
        """Before anything of its files is looked at; and before it waits for that, lest a daemon of it goes on."""
        assert self._runtime is not None
        if self.plan.task.evaluator is None or self.plan.task.evaluator.refresh_runtime:
            await self._runtime.stop()

    # POSTRUN

    async def _postrun(self, outcome: Outcome) -> Verdict:
        runtime, task = self._runtime, self.plan.task
        assert runtime is not None
        await self._keep_logs(runtime)
        exchanges = [exchange async for exchange in self._place.store.exchanges(self.session_id)]
        self._versions = _versions(exchanges)
        calls = await asyncio.to_thread(main_calls, self._session, exchanges)
        last = calls[-1] if calls else None
        self._check_platform(outcome, last)
        if outcome.ended == "finished" and outcome.exit_code != 0 and task.semantics.on_failed_exit == "mask":
            how = "was killed" if outcome.exit_code is None else f"ended with {outcome.exit_code}"
            raise NonzeroExit(f"The harness {how}.")
        outcome = self._outcome = self._by_length(outcome, last)
        changed = await self._keep_diff(runtime)
        self._evidence += await asyncio.to_thread(self._find_probes, exchanges, changed)
        if outcome.ended != "finished":
            policy = task.on_timeout if outcome.ended == "timeout" else task.on_length
            if policy == "mask":
                return Verdict(reason=outcome.ended)
            if policy == "zero":
                return Verdict(0.0, detail={"why": f"It ran into its limit ({outcome.ended})."})
        if self.plan.evaluator is None:
            return Verdict()
        self._work = Graded(
            self.plan,
            self._session,
            exchanges,
            calls,
            outcome,
            runtime,
            warm=self._place.warm,
            before=self._before,
            scratch=self._scratch,
            logs=self._folder.logs,
            judges=self._place.settings.judges,
            expected=self._expected,
            evidence=self._evidence,
        )
        self._expected = False
        try:
            verdict = await self._within_time(self.plan.evaluator.evaluate(self._work), "It was not graded")
        except Spoiled as error:
            verdict = Verdict(0.0, detail={"why": str(error)})
        self._evidence += verdict.evidence
        if not verdict.reward and self._work.timed_out and task.semantics.on_grader_timeout == "mask":
            verdict = Verdict(reason="timeout_grading", detail=verdict.detail)
        return checked(verdict, live=self._work.live)

    def _find_probes(self, exchanges: list[Exchange], changed: bytes) -> list[Evidence]:
        """Paths of the grader's that the agent looked for."""
        probes = GraderPathProbes(self.plan.private_paths, workdir=self.plan.task.runtime.workdir, before=self._before)
        probes.show(self.plan.task.instruction)
        probes.read_exchanges(exchanges)
        probes.read_patch(changed)
        return probes.evidence

    def _check_platform(self, outcome: Outcome, last: Exchange | None) -> None:
        """A harness that never called the model has not failed the task: it never got it. And one whose last call we,
        or the engine, could not answer has not either."""
        ours = self.meter.unrecorded or (last and self.meter.our_failure(last.exchange_id))
        if ours is not None:
            raise EngineFailed(ours)
        failed = outcome.ended == "finished" and outcome.exit_code != 0
        if self.meter.turns == 0 and (failed or self.plan.harness.package is not None):
            raise HarnessError(self._silence(outcome))

    def _silence(self, outcome: Outcome) -> str:
        name = self.plan.harness.name
        if outcome.exit_code == _NOT_THERE and self.plan.installed is None and self.plan.harness.package:
            return f"{name} is not in the runtime: run `polar harness install {name}`."
        if outcome.out_of_memory:
            return f"{name} ran out of memory before its first model call: raise runtime.memory_mb."
        how = f"ended with {outcome.exit_code}" if outcome.ended == "finished" else "used up its time"
        return f"{name} {how} before its first model call: {self._folder.tail() or 'it printed nothing'}"

    def _by_length(self, outcome: Outcome, last: Exchange | None) -> Outcome:
        """A harness that ended by itself may have done so because the model's context was full, or its reply cut."""
        cut = self.meter.too_long or (
            last is not None and (last.finish_reason == "length" or self.meter.was_full(last.exchange_id))
        )
        return msgspec.structs.replace(outcome, ended="length") if outcome.ended == "finished" and cut else outcome

    async def _keep_logs(self, runtime: Runtime) -> None:
        for path in self.plan.harness.logs:
            try:
                await runtime.get(f"{runtime.spec.home}/{path}", self._folder.logs / path.strip("."), max_bytes=_LOGS)
            except FileNotFoundError:
                continue
            except (TooLarge, OSError) as error:
                log.warning("session %s: %s of the harness's logs is not kept: %s", self.session_id, path, error)

    async def _keep_diff(self, runtime: Runtime) -> bytes:
        """What the agent changed in its workspace, as a patch; nothing where that is not known."""
        if self._before is None:
            return b""
        after = self._scratch / "after"
        try:
            await runtime.get(runtime.spec.workdir, after, max_bytes=MOST, all_links=True)
            changed = await asyncio.to_thread(_patch, self._before, after)
        except (TooLarge, OSError) as error:  # for people only: whose doing it is, the evaluator tells
            why = str(error)[:_TOLD].encode(errors="backslashreplace")
            self._folder.workspace_diff.write_bytes(b"# The workspace could not be taken: " + why + b"\n")
            return b""
        self._folder.workspace_diff.write_bytes(changed)
        await asyncio.to_thread(remove_tree, after)
        return changed

    # The end

    async def _tear_down(self) -> None:
        """Nobody cancels this: `cancel` does so only once, and we are past that."""
        runtimes = [] if self._work is None else list(self._work.made)
        if self._runtime is not None:
            runtimes.append(self._runtime)
        answers = await asyncio.gather(*(runtime.remove() for runtime in runtimes), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):  # the next sweep finds it
                log.error("session %s: a runtime could not be removed: %s", self.session_id, answer)
        if self._expected or (self._work is not None and self._work.expected):
            self._place.warm.dismiss(self.plan.grading)
        if self._has_before:
            try:
                await self._place.before.release(self.plan.recipe)
            except SandboxError as error:
                log.error("session %s: %s", self.session_id, error)

    async def _forget(self) -> None:
        """As long as its scratch folder is there, a node that is killed has a session that it did not tell of."""
        try:
            await asyncio.to_thread(remove_tree, self._scratch)
        except SandboxError as error:
            log.error("session %s: %s", self.session_id, error)

    async def _told(self, finished: Finished) -> bool:
        """Durable in the store first; the folder is for people. Whether the store took it."""
        told = True
        try:
            await self._place.sessions.end(self.session_id, finished.verdict)
        except StoreError as error:
            told = False
            finished.verdict = Verdict(reason="store_failed")
            finished.error = str(error)
        try:
            self._folder.write("timing.json", {"began_at": self._timing.began_at, "seconds": finished.seconds})
            self._folder.write("verdict.json", shown(finished))
        except OSError as error:
            log.error("session %s: %s can't be written: %s", self.session_id, self._folder.path, error)
        return told


def _make_session_folders(folder: Path) -> None:
    for name in ("artifacts", "logs/agent"):
        (folder / name).mkdir(parents=True)


def _versions(exchanges: list[Exchange]) -> tuple[int, int] | None:
    found = [span.version for exchange in exchanges for span in exchange.versions]
    return (min(found), max(found)) if found else None


def _patch(before: Path, after: Path) -> bytes:
    return patch(before, after, changes(before, after)).text
