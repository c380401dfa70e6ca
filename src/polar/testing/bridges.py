"""What every bridge must keep:

    class TestMine(BridgeContract):
        plugin = Mine

        async def take_groups(self, bridge, tasks):
            return [read_batch(await bridge.my_trainers_batch(task)) for task in tasks]

`take_groups` has the bridge do what its trainer has it do, and says what the trainer was handed. A stand-in for the
rollout service has sessions of every sort: good and bad ones, of one trace and of several, without a reward, with
nothing to train, and sampled from too old a policy.
"""

import asyncio
import inspect
import json
import threading
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import pytest
import pytest_asyncio
from aiohttp import web

from polar.bridges.bridge import BlockingBridge, Bridge, TrainerBridge
from polar.bridges.rollouts import RolloutClient, SessionGroup
from polar.export.base import SessionItem
from polar.export.polar import render_session_result
from polar.records.result import SessionResult
from polar.testing import leftovers
from polar.testing.contract import Contract
from polar.testing.conversations import ConversationBuilder, make_text_parts
from polar.testing.exporters import ExportedTrace
from polar.weight_sync.updater import WeightUpdater

T = TypeVar("T")

TASKS = ("first", "second")
STEP = "step-1"


class TrainerTrace(NamedTuple):
    """A trace as a trainer has it."""

    trace: ExportedTrace
    versions: tuple[int, ...] | None = None  # of the tokens that train


TrainerSession = list[TrainerTrace]
TrainerGroup = list[TrainerSession]


def read_group(group: SessionGroup) -> TrainerGroup:
    """For trainers that are handed the traces themselves."""
    return [[_read_trace(trace) for trace in item.trajectory.traces] for item in group.items]


def _read_trace(trace: Any) -> TrainerTrace:
    versions = trace.policy_versions[trace.loss_mask == 1].tolist()
    return TrainerTrace(ExportedTrace.from_trace(trace), tuple(versions))


class BridgeContract(Contract):
    kind = "bridges"
    samples: ClassVar[int] = 5  # sessions of a group
    keeps_versions: ClassVar[bool] = True  # whether the trainer has a place for them
    close_seconds: ClassVar[float] = 60.0  # after which what is there is taken to be left

    def open_bridge(self, settings: Mapping[str, Any]) -> Bridge:
        """`settings` are those of `polar.bridges.settings`."""
        made: Bridge = self.plugin(settings)
        return made

    async def take_groups(self, bridge: Bridge, tasks: Sequence[str]) -> list[TrainerGroup]:
        """What the trainer is handed of a group of each task. Rows that train nothing may be among it."""
        return [read_group(group) for group in await run_in_bridge(bridge, bridge.rollouts.run_groups(tasks, STEP))]

    @pytest_asyncio.fixture
    async def service(self) -> AsyncIterator["RolloutServiceDouble"]:
        async with RolloutServiceDouble().running() as service:
            yield service

    @pytest.fixture
    def settings(self, service: "RolloutServiceDouble", tmp_path: Path) -> dict[str, Any]:
        file = tmp_path / "tasks.jsonl"
        agent = {"custom_shell": {"command": "true"}}
        written = [{"task_id": name, "instruction": "Go.", "agent": agent} for name in TASKS]
        file.write_text("\n".join(map(json.dumps, written)))
        return {"server": service.url, "tasks": [str(file)], "name": "contract", "samples": self.samples}

    @asynccontextmanager
    async def opened(self, settings: Mapping[str, Any]) -> AsyncIterator[Bridge]:
        bridge = await asyncio.to_thread(self.open_bridge, settings)
        try:
            yield bridge
        finally:
            await close_bridge(bridge)

    async def test_it_has_rollouts_and_engines(self, settings: dict[str, Any]) -> None:
        async with self.opened(settings) as bridge:
            assert isinstance(bridge.rollouts, RolloutClient)
            assert isinstance(bridge.engines, WeightUpdater)
            assert set(bridge.rollouts.tasks) == set(TASKS)

    async def test_the_trainer_is_handed_what_the_service_recorded(
        self, service: "RolloutServiceDouble", settings: dict[str, Any]
    ) -> None:
        """Tokens, masks, log-probabilities, versions and rewards, to the bit; of each group its own sessions, each with
        all of its traces; and nothing that trains of a session that is not to be trained on."""
        async with self.opened(settings) as bridge:
            groups = await self.take_groups(bridge, TASKS)
        assert len(groups) == len(TASKS)
        for task, group in zip(TASKS, groups, strict=True):
            expected = [self._expect(result) for result in service.get_results(task) if is_trainable(result)]
            assert len(expected) > 1
            assert Counter(_iter_training(group)) == Counter(_iter_training(expected))

    def _expect(self, result: Mapping[str, Any]) -> TrainerSession:
        traces = [read_result_trace(trace) for trace in result["trajectory"]["traces"]]
        return [trace if self.keeps_versions else trace._replace(versions=None) for trace in traces]

    async def test_what_is_left_out_has_a_reason(self, settings: dict[str, Any]) -> None:
        async with self.opened(settings) as bridge:
            found = await run_in_bridge(bridge, bridge.rollouts.run_group(TASKS[0], STEP, samples=5))
        assert found.left_out == {"timeout": 1, "nothing_to_train": 1, "stale": 1}
        assert len(found.items) == len(found.results) == 2

    async def test_a_task_that_comes_twice_has_two_groups(
        self, service: "RolloutServiceDouble", settings: dict[str, Any]
    ) -> None:
        twice = (TASKS[0], TASKS[0])
        async with self.opened(settings) as bridge:
            groups = await run_in_bridge(bridge, bridge.rollouts.run_groups(twice, STEP))
        assert {group.name for group in groups} == set(service.results)
        assert len(service.results) == 2

    async def test_a_step_that_is_run_again_gets_the_same_sessions(
        self, service: "RolloutServiceDouble", settings: dict[str, Any]
    ) -> None:
        """As after a crash: in another bridge."""
        async with self.opened(settings) as bridge:
            first = await self.take_groups(bridge, TASKS)
        known = set(service.results)
        async with self.opened(settings) as bridge:
            again = await self.take_groups(bridge, TASKS)
        assert again == first
        assert set(service.results) == known

    async def test_generation_stands_still_while_engines_get_weights(
        self, service: "RolloutServiceDouble", settings: dict[str, Any]
    ) -> None:
        """And goes on with the new version; where loading fails, it goes on only when the next one has succeeded."""

        async def update(bridge: Bridge, version: int, *, fails: bool = False) -> None:
            async with bridge.engines.updating(version):
                assert service.is_paused
                if fails:
                    raise RuntimeError("The weights did not arrive.")

        async with self.opened(settings) as bridge:
            await run_in_bridge(bridge, update(bridge, 5))
            assert (service.version, service.is_paused) == (5, False)
            with pytest.raises(RuntimeError, match="did not arrive"):
                await run_in_bridge(bridge, update(bridge, 6, fails=True))
            assert (service.version, service.is_paused) == (5, True)
            await run_in_bridge(bridge, update(bridge, 6))
            assert (service.version, service.is_paused) == (6, False)

    async def test_closing_stops_what_it_started(self, settings: dict[str, Any]) -> None:
        """Threads and connections; it may be closed before it has done anything, and again."""
        threads, descriptors = _list_threads(), leftovers.count_open_descriptors()
        async with self.opened(settings):
            pass
        async with self.opened(settings) as bridge:
            await self.take_groups(bridge, TASKS[:1])
            await close_bridge(bridge)
        async with asyncio.timeout(self.close_seconds):
            while _list_threads() - threads or leftovers.count_open_descriptors() > descriptors:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


def _iter_training(group: Iterable[TrainerSession]) -> Iterator[tuple[TrainerTrace, ...]]:
    """The sessions of which something trains, each as its traces that do."""
    for session in group:
        traces = [one for one in session if any(one.trace.trains)]
        if traces:
            yield tuple(sorted(traces, key=lambda one: one.trace.tokens))


def _list_threads() -> set[threading.Thread]:
    """But for those in which tests wait."""
    return {thread for thread in threading.enumerate() if not thread.name.startswith("asyncio_")}


async def run_in_bridge(bridge: Bridge, work: Coroutine[Any, Any, T]) -> T:
    """Waits for a coroutine of `rollouts` or `engines`, in the loop that they belong to."""
    inner = bridge.bridge if isinstance(bridge, TrainerBridge) else bridge
    return await (asyncio.to_thread(inner.run, work) if isinstance(inner, BlockingBridge) else work)


async def close_bridge(bridge: Bridge) -> None:
    closing = bridge.close() if inspect.iscoroutinefunction(bridge.close) else await asyncio.to_thread(bridge.close)
    if closing is not None:
        await closing


def read_result_trace(trace: Mapping[str, Any]) -> TrainerTrace:
    """From a result as the service sends it."""
    prompt, mask = len(trace["prompt_ids"]), trace["loss_mask"]
    recorded = trace["response_logprobs"]
    logprobs = None if recorded is None else [0.0] * prompt + recorded
    tokens = trace["prompt_ids"] + trace["response_ids"]
    versions = [version for version, trains in zip(trace["policy_versions"], mask, strict=True) if trains]
    return TrainerTrace(ExportedTrace.make(tokens, [0] * prompt + mask, logprobs, trace["reward"]), tuple(versions))


def is_trainable(result: Mapping[str, Any]) -> bool:
    is_graded = result["reward"] is not None and not result["metadata"].get("stale")
    return is_graded and bool(result["trajectory"]["traces"])


class RolloutServiceDouble:
    """A rollout service on loopback in which every task has ended when it is submitted. `results` are its sessions, by
    the group's name."""

    def __init__(self) -> None:
        self.url = ""
        self.version = 0
        self.is_paused = False
        self.results: dict[str, list[dict[str, Any]]] = {}
        self._tasks: dict[str, str] = {}  # by the group's name, the task's
        self._sessions: Counter[str] = Counter()

    def get_results(self, task: str) -> list[dict[str, Any]]:
        """Of all groups of a task."""
        return [result for name, known in self._tasks.items() if known == task for result in self.results[name]]

    @asynccontextmanager
    async def running(self) -> AsyncIterator["RolloutServiceDouble"]:
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/health", self._health)
        app.router.add_post("/rollout/tasks", self._submit)
        app.router.add_get("/rollout/task/{name:.*}", self._task)
        app.router.add_route("*", "/policy{step:.*}", self._policy)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _policy(self, request: web.Request) -> web.Response:
        step = request.match_info["step"]
        if step:
            self.is_paused = step == "/pause"
        elif request.method == "POST":
            self.version = (await request.json())["version"]
        return web.json_response({"version": self.version, "paused": self.is_paused})

    async def _submit(self, request: web.Request) -> web.Response:
        answers = []
        for task in (await request.json())["tasks"]:
            name, known = task["task_id"], task["metadata"]["task"]
            if name not in self.results:
                self._tasks[name] = known
                self.results[name] = [self._make_result(name, known) for _ in range(task["num_samples"])]
            answers.append({"task_id": name, "status": "running"})
        return web.json_response({"tasks": answers})

    async def _task(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        results = self.results[name]
        status = {"task_id": name, "status": "completed", "total_sessions": len(results)}
        wanted = [] if request.query.get("results") == "false" else results
        return web.json_response(status | {"completed_sessions": len(results), "results": wanted})

    def _make_result(self, name: str, task: str) -> dict[str, Any]:
        """The next session of a task: each sort in turn."""
        number = self._sessions[task]
        self._sessions[task] += 1
        made = render_session_result(make_session(f"{task}-{number}", number % 5, TASKS.index(task), name))
        made["metadata"] |= {"task": task, "stale": number % 5 == 4}
        return SessionResult.model_validate(made).model_dump()


def make_session(session_id: str, sort: int, offset: int, group: str) -> SessionItem:
    """Of one of five sorts; `offset` tells tasks apart."""
    conversation = ConversationBuilder(session_id)
    ask = {"role": "user", "content": f"Solve {session_id}."}
    conversation.add_call([ask], make_text_parts("Done."), untrainable="aborted" if sort == 3 else None)
    if sort == 1:
        conversation.add_call(
            [{"role": "user", "content": "You look into files."}], make_text_parts("I did."), role="subagent"
        )
    rewards = (1.0 - offset / 4, 0.25 * offset, None, 0.5, 1.0)
    return conversation.build_item(rewards[sort], "timeout" if sort == 2 else None, task_id=group)


def group_sessions(rows: Iterable[tuple[str, str, TrainerTrace]], tasks: Sequence[str]) -> list[TrainerGroup]:
    """Rows of a batch (task, session, trace) as groups of sessions, for `take_groups`."""
    groups: dict[str, dict[str, TrainerSession]] = {task: defaultdict(list) for task in tasks}
    for task, session, trace in rows:
        groups[task][session].append(trace)
    return [list(groups[task].values()) for task in tasks]
