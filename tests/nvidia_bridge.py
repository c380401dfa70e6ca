"""A trainer's bridge that behaves as Miles' public one does: it knows the task API of NVIDIA's Polar, not ours.

A worker thread submits groups of a data source, each as one task with a callback address on a port of its own. What
is posted there, or polled where nothing comes, is parsed by the models of the installed `polar` package; an answer
that they refuse is lost. A group is dropped where its task did not complete, where results are missing, or where none
of its tokens can be trained on. The entry point blocks until it has a batch of groups.
"""

import asyncio
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType
from typing import Any

import httpx
import pydantic
from aiohttp import web


class Status(Enum):
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class Sample:
    """What the trainer trains on, one for each trace."""

    group_index: int
    index: int
    prompt: Any = ""
    tokens: list[int] = field(default_factory=list)
    response_length: int = 0
    rollout_id: int | None = None
    reward: dict[str, float] = field(default_factory=dict)
    loss_mask: list[int] = field(default_factory=list)
    rollout_log_probs: list[float] = field(default_factory=list)
    status: Status = Status.COMPLETED
    remove_sample: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def trainable(self) -> int:
        return 0 if self.remove_sample else sum(self.loss_mask)


class Killed(Exception):
    """The trainer is no more."""


class Dropped(Exception):
    """A group that is not trained on, by the kind of the reason."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind


def samples_of(result: Any, group_index: int, index: int) -> list[Sample]:
    """Of one session: as many as it has traces, or one that is masked."""
    about = {
        "session_id": result.session_id,
        "session_status": str(getattr(result.status, "value", result.status)),
        "timing": result.timing.model_dump(mode="python"),
        "error": result.error,
        "metadata": dict(result.metadata),
        "evaluation": result.trajectory.metadata.get("evaluation"),
    }
    samples = []
    for trace in result.trajectory.traces:
        if not trace.prompt_ids or not trace.response_ids:
            continue
        length = len(trace.response_ids)
        status = _status_of(result, trace)
        masked = status in (Status.ABORTED, Status.FAILED)
        if not masked and len(trace.loss_mask) != length:
            raise Dropped("logprob_error", f"{result.session_id}: the mask does not fit")
        loss_mask = [0] * length if masked else list(trace.loss_mask)
        logprobs = trace.response_logprobs
        if logprobs is None and any(loss_mask):
            raise Dropped("logprob_error", f"{result.session_id}: there are no log-probabilities")
        if logprobs is not None and len(logprobs) != length:
            raise Dropped("logprob_error", f"{result.session_id}: the log-probabilities don't fit")
        samples.append(
            Sample(
                group_index=group_index,
                index=index,
                prompt=list(trace.prompt_messages) or "",
                tokens=[*trace.prompt_ids, *trace.response_ids],
                response_length=length,
                rollout_id=index,
                reward={"score": 0.0 if trace.reward is None else float(trace.reward)},
                loss_mask=loss_mask,
                rollout_log_probs=[0.0] * length if logprobs is None else [float(value) for value in logprobs],
                status=status,
                metadata={"polar": {**about, "text": _text_of(trace.response_messages)}},
            )
        )
    placeholder = Sample(
        group_index=group_index,
        index=index,
        tokens=[0, 0],
        response_length=1,
        rollout_id=index,
        reward={"score": 0.0},
        loss_mask=[0],
        rollout_log_probs=[0.0],
        status=Status.ABORTED,
        remove_sample=True,
        metadata={"polar": {**about, "placeholder": True}},
    )
    return samples or [placeholder]


def _status_of(result: Any, trace: Any) -> Status:
    if "TIMEOUT" in (result.trajectory.status, result.status):
        return Status.ABORTED
    if "ERROR" in (result.trajectory.status, result.status) or result.error or result.trajectory.error:
        return Status.FAILED
    return Status.TRUNCATED if trace.finish_reason == "length" else Status.COMPLETED


def _text_of(messages: list[dict[str, Any]]) -> str:
    return "\n".join(f"[{message['role']}] {message.get('content') or ''}" for message in messages)


@dataclass
class Group:
    number: int
    task_id: str
    samples: list[Sample]


class Bridge:
    """`groups` gives task documents, without a task_id; `models` is `polar.rollout.models` of the installed package."""

    def __init__(
        self,
        url: str,
        models: ModuleType,
        groups: Iterator[dict[str, Any]],
        *,
        group_size: int,
        batch: int,
        salt: str,
        poll_seconds: float = 60.0,
    ) -> None:
        self._url = url
        self._models = models
        self._groups = groups
        self._group_size = group_size
        self._batch = batch
        self._salt = salt
        self._poll_seconds = poll_seconds
        self._wanted = 0
        self._done: queue.Queue[Group] = queue.Queue()
        self._events: dict[str, asyncio.Event] = {}
        self._results: dict[str, Any] = {}
        self._running = True
        self._thread = threading.Thread(target=lambda: asyncio.run(self._work()), daemon=True)
        self.metrics: Counter[str] = Counter()
        self.problems: list[str] = []
        self.port: int | None = None

    def start(self) -> "Bridge":
        self._thread.start()
        return self

    def kill(self) -> None:
        """As a trainer dies: nothing that it waited for is waited for any more."""
        self._running = False
        self._thread.join()

    def generate_rollout(self, *, seconds: float = 120.0) -> list[list[Sample]]:
        """The trainer's entry point."""
        self._wanted += self._batch
        found: list[list[Sample]] = []
        deadline = time.monotonic() + seconds
        while len(found) < self._batch:
            if not self._running:
                raise Killed
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(found)} of {self._batch} groups: {dict(self.metrics)}, {self.problems}")
            try:
                found.append(self._done.get(timeout=0.05).samples)
            except queue.Empty:
                continue
        self._wanted -= self._batch
        return found

    async def _work(self) -> None:
        app = web.Application(client_max_size=2**28)
        app.router.add_post("/callback/task_result", self._on_callback)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.port = runner.addresses[0][1]
        active: set[asyncio.Task[None]] = set()
        number = 0
        try:
            async with httpx.AsyncClient(timeout=60) as client:
                while self._running:
                    active = {one for one in active if not one.done()}
                    while len(active) + self._done.qsize() < self._wanted:
                        document = next(self._groups, None)
                        if document is None:
                            break
                        active.add(asyncio.create_task(self._collect(client, number, document)))
                        number += 1
                    await asyncio.sleep(0.02)
        finally:
            for one in active:
                one.cancel()
            await asyncio.gather(*active, return_exceptions=True)
            await runner.cleanup()

    async def _on_callback(self, request: web.Request) -> web.Response:
        told = await request.json()
        try:
            result = self._models.TaskResult.model_validate(told)
        except pydantic.ValidationError as error:
            self.problems.append(str(error))
            return web.json_response({"ok": False})
        self._results[result.task_id] = result
        if result.task_id in self._events:
            self._events[result.task_id].set()
        return web.json_response({"ok": True})

    async def _collect(self, client: httpx.AsyncClient, number: int, document: dict[str, Any]) -> None:
        task_id = f"miles-{number}-{self._salt}"
        task = {
            **document,
            "task_id": task_id,
            "num_samples": self._group_size,
            "callback_url": f"http://127.0.0.1:{self.port}/callback/task_result",
            "metadata": {**(document.get("metadata") or {}), "group_id": number, "policy_version": 0},
        }
        try:
            result = await self._submit_and_wait(client, task)
            self._done.put(Group(number, task_id, self._samples(result, number)))
            self.metrics["completed_groups"] += 1
        except Dropped as drop:
            self.metrics[f"dropped_{drop.kind}"] += 1
            self.problems.append(f"{task_id}: {drop}")
        except Exception as error:  # noqa: BLE001 (as the bridge does: whatever it is, the group is gone)
            self.metrics["dropped_failed"] += 1
            self.problems.append(f"{task_id}: {error!r}")

    async def _submit_and_wait(self, client: httpx.AsyncClient, task: dict[str, Any]) -> Any:
        task_id = task["task_id"]
        event = self._events[task_id] = asyncio.Event()
        try:
            (await client.post(f"{self._url}/rollout/task/submit", json=task)).raise_for_status()
            self.metrics["submitted"] += 1
            while True:
                try:
                    await asyncio.wait_for(event.wait(), self._poll_seconds)
                except TimeoutError:
                    answer = (await client.get(f"{self._url}/rollout/task/{task_id}")).raise_for_status()
                    status = self._models.TaskStatus.model_validate(answer.json())
                    if status.status not in ("completed", "failed"):
                        continue
                    self.metrics["polled"] += 1
                    return self._models.TaskResult(
                        task_id=task_id,
                        status=status.status,
                        results=status.results,
                        result_paths=status.result_paths,
                    )
                self.metrics["called_back"] += 1
                return self._results[task_id]
        finally:
            self._events.pop(task_id, None)
            self._results.pop(task_id, None)

    def _samples(self, result: Any, number: int) -> list[Sample]:
        if result.status != "completed":
            raise Dropped("failed", f"the task is {result.status}")
        if len(result.results) != self._group_size:
            raise Dropped("failed", f"{len(result.results)} results of {self._group_size}")
        found = [
            sample
            for position, one in enumerate(result.results)
            for sample in samples_of(one, number, number * self._group_size + position)
        ]
        if not any(sample.trainable for sample in found):
            raise Dropped("zero_trainable", "there is no token to train on")
        return found


def endless(*documents: dict[str, Any], then: Callable[[], dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A data source that never ends."""
    yield from documents
    while True:
        yield then()
