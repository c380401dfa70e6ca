"""The control plane against its own OpenAPI document: whatever the document allows, and much that it does not, is
answered as it says, by a service that nobody uses and by one in the midst of work."""

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from polar.engines.scripted import ScriptedServer
from polar.records.task import TaskRequest
from polar.rollout.protocol import Heartbeat, JoinRequest, Lease, SessionOutcome, UnknownNode
from polar.service import Service
from tests.conditions import wait_until
from tests.integration import stack
from tests.unit.rollout.served import task

T = TypeVar("T")

PATIENCE = 120
NODE = "n1"
FREE = 100
"""Sessions that are leased, and that nobody has told the end of."""
CONFORMS = (status_code_conformance, content_type_conformance, response_schema_conformance)
OF_ENGINES = ("/policy", "/engines")
"""What is told there takes nodes and engines, which may not do it (502), or not in time (504)."""


class Api:
    """A whole service in a thread of its own, so that blocking clients can call it."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._stack = AsyncExitStack()
        self.service: Service
        self.known: dict[str, list[str]] = {}  # values of paths' parameters that lead somewhere
        self.leases: list[Lease] = []

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        done: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return done.result(PATIENCE)

    def __enter__(self) -> "Api":
        self._thread.start()
        self.do(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self.do(self._stack.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> None:
        _stay_here(self._loop)
        engine = await self._stack.enter_async_context(ScriptedServer())
        chosen = stack.settings([engine.url], server={"beat_seconds": 0.05, "lease_seconds": 60})
        self.service = await self._stack.enter_async_context(Service(chosen, self._data))

    async def live_in(self) -> None:
        """Tasks that run, have ended, and wait; sessions of both kinds; a node that does what it is told."""
        rollout = self.service.rollout
        beating = asyncio.create_task(self._beats())
        self._stack.push_async_callback(_ended, beating)
        await self._join()
        tasks = [task("ended", num_samples=3), task("running", num_samples=FREE), task("waiting", num_samples=2)]
        tasks += [task("a/b", run="other"), task("off", callback_url="http://127.0.0.1:1/none")]
        await rollout.submit([TaskRequest.model_validate(one) for one in tasks])
        ending, *_, cancelled = await rollout.lease_manager.lease(NODE, [], 4)
        session, _ = await self.service.sessions.create({"task_id": "ended"})
        ends = [SessionOutcome(ending.work_id, ending.fence, session.session_id, reward=0.5)]
        self.leases = await rollout.lease_manager.lease(NODE, [ending.lease_id, cancelled.lease_id], FREE)
        ends += [
            SessionOutcome(lease.work_id, lease.fence, None, reason="sandbox_failed" if lease.sample else "timeout")
            for lease in self.leases
            if lease.task_id == "ended"
        ]
        await rollout.lease_manager.finish(NODE, ends)
        await rollout.cancel("default", "off")
        by_hand, _ = await self.service.sessions.create({"by": "hand"})
        self.known = {
            "task_id": ["ended", "running", "waiting", "off", "a/b"],
            "session_id": [session.session_id, by_hand.session_id],
            "node_id": [NODE],
            "run": ["default", "other"],
        }

    async def _join(self) -> None:
        await self.service.rollout.lease_manager.join(JoinRequest(NODE, "node", ["local"], FREE, store="elsewhere"))

    async def _beats(self) -> None:
        """It may be sent away at any time, and then comes back."""
        applied = -1
        while True:
            try:
                told = Heartbeat([], {"run": 1}, seen=applied, applied=applied)
                orders = await self.service.rollout.lease_manager.heartbeat(NODE, told)
            except UnknownNode:
                await self._join()
                continue
            if orders.engines is not None:
                applied = orders.engines.generation


async def _ended(beating: "asyncio.Task[None]") -> None:
    beating.cancel()
    await asyncio.gather(beating, return_exceptions=True)


def _stay_here(loop: asyncio.AbstractEventLoop) -> None:
    """Engines are added under any name that can be: none of them is looked up, or connected to."""
    look_up, connect = loop.getaddrinfo, loop.sock_connect

    async def found(host: Any, *arguments: Any, **options: Any) -> Any:
        if host not in ("127.0.0.1", "localhost"):
            raise socket.gaierror(socket.EAI_NONAME, "not in a test")
        return await look_up(host, *arguments, **options)

    async def connected(sock: Any, address: Any) -> None:
        if address[0] != "127.0.0.1":
            raise ConnectionRefusedError("not in a test")
        await connect(sock, address)

    loop.getaddrinfo = found  # type: ignore[method-assign]
    loop.sock_connect = connected  # type: ignore[method-assign]


class Attack:
    """Calls of an API, and what is asked of every answer."""

    def __init__(self, api: Api, http: requests.Session) -> None:
        self.api = api
        self.schema: BaseSchema = schemathesis.openapi.from_url(f"{api.service.control_url}/openapi.json")
        self.answers: Counter[tuple[str, int]] = Counter()
        self.problems: dict[str, str] = {}  # one of a kind
        self._http = http

    def operations(self) -> list[APIOperation[Any, Any, Any, Any]]:
        return [found.ok() for found in self.schema.get_all_operations()]

    def call(self, case: Case, known: int = 0) -> None:
        """With `known`, what it names in its path is there; with its body, a node ends work that it has."""
        for name, values in self.api.known.items() if known else ():
            if name in case.path_parameters:
                case.path_parameters[name] = values[known % len(values)]
        if known and case.path == "/nodes/{node_id}/finish" and isinstance(case.body, list):
            for ended in case.body:
                if isinstance(ended, dict) and self.api.leases:
                    lease = self.api.leases[known % len(self.api.leases)]
                    ended |= {"work_id": lease.work_id, "fence": lease.fence}
        if "wait" in case.query:
            case.query["wait"] = _short(case.query["wait"])
        answer = case.call(session=self._http, timeout=PATIENCE)
        self.answers[f"{case.method} {case.path}", answer.status_code] += 1
        checks = list(CONFORMS)
        if not (answer.status_code in (502, 504) and case.path.startswith(OF_ENGINES)):
            checks.append(not_a_server_error)
        try:
            case.validate_response(answer, checks=checks)
        except FailureGroup as failures:  # kept here: what is sent again need not fail again
            for failure in failures.exceptions:
                kind = f"{case.method} {case.path} {answer.status_code} {type(failure).__name__}"
                self.problems.setdefault(kind, f"{failure}\n{case.as_curl_command()}")

    def read_known(self, operation: APIOperation[Any, Any, Any, Any]) -> None:
        """Reads what is known to exist until one answer is 200. The node may have been sent away a moment ago."""

        def is_read() -> bool:
            for known in range(1, FREE + 1):
                self.call(operation.Case(path_parameters=dict.fromkeys(self.api.known, "")), known)
                if self.answers[operation.label, 200]:
                    return True
            return False

        asyncio.run(wait_until(is_read))

    def listen(self, case: Case, known: int) -> None:
        asked = case.as_transport_kwargs()
        with self._http.request(**asked, stream=True, timeout=PATIENCE) as answer:
            self.answers[f"{case.method} {case.path}", answer.status_code] += 1
            assert answer.status_code in (200, 422), answer.content
            if answer.status_code == 200:
                assert answer.headers["Content-Type"].startswith("text/event-stream")
                assert next(answer.iter_lines()) == b": listening"

    def fuzz(
        self,
        operation: APIOperation[Any, Any, Any, Any],
        mode: GenerationMode,
        examples: int,
        call: Callable[[Case, int], None] | None = None,
    ) -> None:
        """The same cases each time."""

        @settings(
            max_examples=examples,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode), known=st.integers(0, FREE))
        def calls(case: Case, known: int) -> None:
            (call or self.call)(case, known if self.api.known else 0)

        try:
            calls()
        except Unsatisfiable:
            assert mode is GenerationMode.NEGATIVE  # nothing is wrong for those that take nothing

    def boundaries(self, operation: APIOperation[Any, Any, Any, Any]) -> None:
        """Each limit of each field, kept and broken."""
        config = self.schema.config.generation_for(operation=operation)
        modes = list(GenerationMode)
        for number, case in enumerate(
            self.schema.iter_coverage_cases(operation, generation_modes=modes, generation_config=config)
        ):
            self.call(case, number if self.api.known else 0)


def _short(wait: Any) -> Any:
    try:
        return min(float(wait), 0.01)
    except (TypeError, ValueError):
        return wait


@contextmanager
def attacked(data: Path, *, lived_in: bool) -> Iterator[Attack]:
    with Api(data) as api, requests.Session() as http:
        if lived_in:
            api.do(api.live_in())
        yield Attack(api, http)


pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module:FutureWarning")
"""Said where any thread does: here it is the service's."""


def attack_all(attack: Attack, examples: int, *, boundaries: bool = False) -> None:
    """Everything; then what can be read, again, of all that was written."""
    operations = [operation for operation in attack.operations() if operation.path != "/events"]  # which has no end
    for operation in operations:
        for mode in GenerationMode:
            attack.fuzz(operation, mode, examples)
        if boundaries:
            attack.boundaries(operation)
    reading = [operation for operation in operations if operation.method == "get"]
    for operation in reading:
        attack.fuzz(operation, GenerationMode.POSITIVE, examples)
    assert not attack.problems, "\n\n".join(f"{kind}\n{told}" for kind, told in attack.problems.items())
    called = {name for name, _ in attack.answers}
    assert called >= {operation.label for operation in operations}
    # Generated values depend on what this process has imported: they need not name anything that exists.
    for operation in reading if attack.api.known else ():
        if not attack.answers[operation.label, 200]:
            attack.read_known(operation)


@pytest.mark.parametrize("lived_in", [pytest.param(False, marks=pytest.mark.slow), True])
def test_calls_are_answered_as_the_document_says(tmp_path: Path, lived_in: bool) -> None:
    with attacked(tmp_path, lived_in=lived_in) as attack:
        attack_all(attack, 4 if not lived_in else 1)


@pytest.mark.faults
@pytest.mark.parametrize("lived_in", [False, True])
def test_many_calls_are_answered_as_the_document_says(tmp_path: Path, lived_in: bool) -> None:
    with attacked(tmp_path, lived_in=lived_in) as attack:
        attack_all(attack, 100, boundaries=True)


def test_streams_of_events_begin_as_the_document_says(tmp_path: Path) -> None:
    """Of each the beginning: they have no end."""
    with attacked(tmp_path, lived_in=True) as attack:
        (operation,) = (one for one in attack.operations() if one.path == "/events")
        for mode in GenerationMode:
            attack.fuzz(operation, mode, 10, attack.listen)
        assert attack.answers["GET /events", 200] > 3
        assert attack.answers["GET /events", 422] > 3
