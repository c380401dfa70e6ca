"""The network between the server and everybody else: it loses calls and answers, delays, repeats and reorders them."""

import asyncio
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from polar.errors import StoreError
from polar.rollout.engine_controller import NotAppliedYet
from polar.rollout.protocol import (
    FinishStatus,
    Heartbeat,
    HeartbeatResponse,
    JoinRequest,
    JoinResponse,
    Lease,
    LeaseId,
    ServerUnreachable,
    SessionOutcome,
    UnknownNode,
)
from tests.simulation.loop import VirtualLoop

if TYPE_CHECKING:
    from tests.simulation.servers import ServerProcess

_PATIENCE = (8.0, 8.0, 20.0)  # seconds that a caller waits for an answer
_LATE = 2.0  # seconds that a call or an answer is on its way at most


class Weather:
    """How often what goes wrong, for now."""

    def __init__(self) -> None:
        self.loses = self.loses_answers = self.repeats = 0.0
        self.slow = 1.0
        self.cut: set[str] = set()  # names of those who reach nobody


class _Call:
    def __init__(self, future: "asyncio.Future[Any]") -> None:
        self.future = future

    def settle(self, answer: Any, error: Exception | None) -> None:
        if self.future.done():
            return
        if error is None:
            self.future.set_result(answer)
        else:
            self.future.set_exception(error)


class Network:
    def __init__(
        self,
        loop: VirtualLoop,
        weather: Weather,
        found: "Callable[[], ServerProcess | None]",
        crashed: Callable[[str, Exception], None],
    ) -> None:
        """`found` is the server that has the address; `crashed` hears of what no server should raise."""
        self._loop = loop
        self.weather = weather
        self._found = found
        self._crashed = crashed

    def _delay(self, rng: random.Random) -> float:
        return min(rng.expovariate(1 / (0.01 * self.weather.slow)), _LATE)

    async def call(
        self, caller: str, rng: random.Random, work: "Callable[[ServerProcess], Any]", *, repeats: bool = True
    ) -> Any:
        """`work` is done at the server."""
        weather, call = self.weather, _Call(self._loop.create_future())
        given_up = self._loop.later(rng.choice(_PATIENCE), call.settle, None, ServerUnreachable("No answer in time."))
        if rng.random() >= weather.loses and caller not in weather.cut:
            self._loop.later(self._delay(rng), self._deliver, caller, rng, work, call)
            if repeats and rng.random() < weather.repeats:
                self._loop.later(rng.uniform(0, _LATE), self._deliver, caller, rng, work, None)
        elif rng.random() < 0.7:  # else nobody says anything
            self._loop.later(self._delay(rng), call.settle, None, ServerUnreachable("The connection was reset."))
        try:
            return await call.future
        finally:
            given_up.cancel()

    def _deliver(
        self, caller: str, rng: random.Random, work: "Callable[[ServerProcess], Any]", call: _Call | None
    ) -> None:
        server = self._found()
        if server is None or server.process.dead:
            if call is not None:
                self._loop.later(self._delay(rng), call.settle, None, ServerUnreachable("Nobody listens there."))
            return
        if call is not None:
            server.calls.append(call)

        async def serve() -> None:
            answer, error = None, None
            try:
                answer = await work(server)
            except (UnknownNode, NotAppliedYet) as raised:
                error = raised
            except StoreError as raised:
                error = ServerUnreachable(str(raised))  # type: ignore[assignment]
            except Exception as raised:  # noqa: BLE001 - whatever it was, it should not have been
                self._crashed(server.name, raised)
            if call is not None:
                self._answer(caller, rng, call, answer, error)

        server.process.spawn(serve())

    def _answer(self, caller: str, rng: random.Random, call: _Call, answer: Any, error: Exception | None) -> None:
        if caller in self.weather.cut or rng.random() < self.weather.loses_answers:
            if rng.random() < 0.7:
                self._loop.later(self._delay(rng), call.settle, None, ServerUnreachable("The connection was reset."))
            return
        self._loop.later(self._delay(rng), call.settle, answer, error)

    def reset(self, calls: list[_Call]) -> None:
        """Their server is dead."""
        for call in calls:
            self._loop.later(0.001, call.settle, None, ServerUnreachable("The connection was reset."))


def _sent(value: Any, kind: Any) -> Any:
    """As it comes out at the other end."""
    return msgspec.json.decode(msgspec.json.encode(value), type=kind)


class RemoteServer:
    """The server, as a node sees it from afar (protocol.Server)."""

    def __init__(
        self, network: Network, caller: str, rng: random.Random, told: Callable[[SessionOutcome, FinishStatus], None]
    ) -> None:
        """`told` hears what the server answers to each end."""
        self._network = network
        self._caller = caller
        self._rng = rng
        self._told = told

    async def _call(self, name: str, kind: Any, node_id: str, *said: tuple[Any, Any]) -> Any:
        """With each thing that is said goes its type."""
        sent = [(msgspec.json.encode(value), of) for value, of in said]

        async def work(server: "ServerProcess") -> Any:
            heard = [msgspec.json.decode(data, type=of) for data, of in sent]
            first = () if name == "join" else (node_id,)
            return _sent(await getattr(server.rollout.lease_manager, name)(*first, *heard), kind)

        return await self._network.call(self._caller, self._rng, work)

    async def join(self, request: JoinRequest) -> JoinResponse:
        found: JoinResponse = await self._call("join", JoinResponse, request.node_id, (request, JoinRequest))
        return found

    async def lease(self, node_id: str, holding: list[LeaseId], room: int) -> list[Lease]:
        found: list[Lease] = await self._call("lease", list[Lease], node_id, (holding, list[LeaseId]), (room, int))
        return found

    async def heartbeat(self, node_id: str, heartbeat: Heartbeat) -> HeartbeatResponse:
        found: HeartbeatResponse = await self._call("heartbeat", HeartbeatResponse, node_id, (heartbeat, Heartbeat))
        return found

    async def finish(self, node_id: str, ended: list[SessionOutcome]) -> list[FinishStatus]:
        found: list[FinishStatus] = await self._call(
            "finish", list[FinishStatus], node_id, (ended, list[SessionOutcome])
        )
        for one, answer in zip(ended, found, strict=True):
            self._told(one, answer)
        return found

    async def send_session(self, node_id: str, data: bytes) -> None:
        await self._call("send_session", None, node_id, (data, bytes))

    async def leave(self, node_id: str) -> None:
        await self._call("leave", None, node_id)
