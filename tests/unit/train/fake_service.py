"""A rollout service and an engine in this process: what is sampled follows from the weights and the task's name alone.

It outlives trainers, as the real one does: what it was given stays, and is given again from any cursor on.
"""

import asyncio
import copy
import hashlib
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from polar.client.feed import RawResult
from polar.records.result import SessionResult, TaskStatus, TrajectoryResult
from polar.records.task import TaskRequest
from polar.records.trajectory import SessionPaths, TokenPath
from polar.train.learner import Learner
from polar.weight_sync.probe import Difference
from polar.weight_sync.publisher import EngineVersions
from polar.weight_sync.updater import SyncReport
from tests.unit.train import documents

VOCABULARY = 16
_TURNS, _SAMPLED = 2, 3


class FakeService:
    def __init__(self, model: Any) -> None:
        self.base = copy.deepcopy(model)
        self.model = copy.deepcopy(model)
        self.version = 0  # as the engine has it
        self.label = 0  # as the service has it
        self.groups: dict[str, tuple[int, list[SessionPaths]]] = {}  # by task id: with their cursors
        self.requests: dict[str, TaskRequest] = {}
        self.reward_of: Any = lambda ids: float(np.mean(np.asarray(ids) < VOCABULARY // 2))
        self._came = asyncio.Condition()

    # As AsyncClient has it

    async def submit(self, tasks: Iterable[TaskRequest]) -> None:
        for task in tasks:
            if task.task_id in self.requests:
                assert task == self.requests[task.task_id], "the same name, and another task"
                continue
            self.requests[task.task_id] = task
            self.groups[task.task_id] = (
                len(self.groups) + 1,
                [self._session(task, n) for n in range(task.num_samples)],
            )
        async with self._came:
            self._came.notify_all()

    def results(self, after: int, *, unit: str, raw: bool, builder: str, limit: int) -> "_Feed":
        assert (unit, raw) == ("group", True)
        return _Feed(self, after, builder)

    async def trajectory(self, task_id: str) -> dict[str, Any]:
        return documents.tree(self.groups[task_id][1])

    async def as_completed(self, task_ids: Iterable[str]) -> AsyncIterator[TaskStatus]:
        for name in task_ids:
            results = [
                SessionResult(
                    session_id=one.session_id,
                    task_id=name,
                    status="COMPLETED",
                    reward=one.reward,
                    trajectory=TrajectoryResult(status="COMPLETED"),
                )
                for one in self.groups[name][1]
            ]
            yield TaskStatus(task_id=name, status="completed", results=results)

    async def page(self, after: int, builder: str) -> list[RawResult]:
        async with self._came:
            await self._came.wait_for(lambda: len(self.groups) > after)
        return [
            RawResult(cursor, name, documents.feed(sessions, builder, name, cursor))
            for name, (cursor, sessions) in self.groups.items()
            if cursor > after
        ]

    # Sampling

    def sessions(self, prefix: str) -> Iterator[SessionPaths]:
        for name, (_, sessions) in self.groups.items():
            if name.startswith(prefix):
                yield from sessions

    def _session(self, task: TaskRequest, sample: int) -> SessionPaths:
        name = f"{task.task_id}#{sample}"
        # The same whatever the run is called: the run's own part of the name is random.
        seed = int.from_bytes(hashlib.sha256(name.partition("/")[2].encode()).digest()[:4])
        random = torch.Generator().manual_seed(seed)
        context = [1, 2, 3, seed % VOCABULARY]
        paths, sampled = [], []
        for turn in range(_TURNS):
            ids, logprobs = self._sampled(context, random)
            paths.append(
                TokenPath(
                    session_id=name,
                    exchange_id=f"{name}-{turn}",
                    seq=turn,
                    prompt=np.array(context, np.int32),
                    sampled=np.array(ids, np.int32),
                    logprobs=np.array(logprobs, np.float32),
                    versions=np.full(len(ids), self.version, np.int32),
                    num_trainable=len(ids),
                    scale=1.0,
                )
            )
            sampled += ids
            context = [*context, *ids, 4]
        return SessionPaths(name, paths, self.reward_of(sampled))

    @torch.no_grad()
    def _sampled(self, context: list[int], random: torch.Generator) -> tuple[list[int], list[float]]:
        ids, logprobs = list(context), []
        for _ in range(_SAMPLED):
            logits = self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
            chosen = int(torch.multinomial(logits.softmax(-1), 1, generator=random))
            logprobs.append(float(logits.log_softmax(-1)[chosen]))
            ids.append(chosen)
        return ids[len(context) :], logprobs


class _Feed:
    def __init__(self, service: FakeService, after: int, builder: str) -> None:
        self._service = service
        self._after = after
        self._builder = builder

    async def __aenter__(self) -> "_Feed":
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def __aiter__(self) -> AsyncIterator[RawResult]:
        while True:
            for result in await self._service.page(self._after, self._builder):
                self._after = result.cursor
                yield result


class FakeEngines:
    """trainer.Engines, for the service's one engine."""

    def __init__(self, service: FakeService, learner: Learner) -> None:
        self._service = service
        self._learner = learner
        self.seen: list[int] = []

    async def read_versions(self) -> EngineVersions:
        return EngineVersions({self._service.label}, {self._service.version})

    async def has_trainer_weights(self, version: int) -> bool:
        own, theirs = self._learner.model.state_dict(), self._service.model.state_dict()
        return all(torch.equal(own[name], theirs[name]) for name in own)

    async def publish(self, version: int) -> SyncReport:
        assert version >= max(self._service.version, self._service.label), "versions never go back"
        if version == self._service.version:
            assert await self.has_trainer_weights(version), "a version stands for one set of weights"
        self.load(version)
        self._service.label = version
        return SyncReport(version, 1, Difference(0, 0.0, 0.0), seconds={"prepare": 0.25})

    def load(self, version: int) -> None:
        self._service.model.load_state_dict(self._learner.model.state_dict())
        self._service.version = version
