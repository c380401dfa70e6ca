"""Engines of runs, the policy that they hold, and whether generation stands still. What is asked for here is answered
when every node that is alive has it in force."""

from typing import Annotated, Literal
from urllib.parse import urlsplit

from fastapi import APIRouter, HTTPException, Query
from pydantic import AfterValidator, BaseModel, Field

from polar.config import DEFAULT_RUN
from polar.engines.wanted import PauseMode, PoolState
from polar.rollout.members import NodeView
from polar.rollout.routes.bodies import Body, Run
from polar.rollout.routes.documents import problems
from polar.rollout.routes.parts import Parts

_IN_FORCE = 60.0  # seconds that nodes have to apply something

Version = Annotated[int, Field(ge=0, lt=2**31)]


def _address(url: str) -> str:
    """As it is told to nodes, shown, and logged: so no secret stands in it."""
    try:
        parts = urlsplit(url)
        named = bool(parts.hostname) and parts.port != 0
    except ValueError as error:
        raise ValueError(f"it is no address: {error}") from error
    if not named or parts.query or parts.fragment:
        raise ValueError("it takes a host, perhaps a port and a path, and nothing else")
    if "@" in parts.netloc:
        raise ValueError("it must not hold a name or a password: set [engine] api_key")
    return url


Address = Annotated[str, AfterValidator(_address), Field(pattern=r"^https?://[!-~]+$", max_length=2000)]
OfRun = Annotated[Run | None, Query(description="the experiment whose engines are meant [default: default]")]


class OfOneRun(Body):
    run: Run | None = Field(None, description="as in the query")


class NewPolicy(OfOneRun):
    version: Version
    replica: str | None = Field(None, description="the URL of one replica; default: all of the run's")


class Pause(OfOneRun):
    mode: Literal["freeze", "hold", "drain", "sleep"] = Field(
        "freeze",
        description="freeze: running calls stand still, where the engine can; hold: they run on; drain: wait for them; "
        "sleep: wait for them, then the engines give their memory away",
    )
    timeout: float = Field(600, gt=0, le=3600, description="seconds to wait for it")


class NewEngine(OfOneRun):
    url: Address
    version: Version | None = Field(None, description="of the policy that it holds [default: as known, else 0]")


class ShownReplica(BaseModel):
    """What runs there, and how it is, as far as this process knows."""

    url: str
    version: int
    running: int = Field(description="calls of this process")
    down: bool = Field(description="it did not answer, and is left alone for a while")
    asleep: bool


class ShownPolicy(BaseModel):
    """The engines of a run, and the policy that they hold."""

    run: str
    paused: bool
    mode: PauseMode | None = Field(description="of the pause; settle: it is about to end")
    frozen: bool = Field(description="running calls stand still")
    held: int = Field(description="calls that wait for generation to go on; at other nodes, of all runs")
    running: int = Field(description="calls at the engines; of other nodes, those of all runs")
    replicas: list[ShownReplica]


def shown(parts: Parts, run: str) -> ShownPolicy:
    """What runs at each replica is known of this process alone; `running` counts every node."""
    state = _state(parts, run)
    pool = parts.pools.of(run)
    here = {replica.url: replica for replica in pool.replicas}
    replicas = []
    for wanted in state.replicas:
        replica = here.get(wanted.url)
        replicas.append(
            ShownReplica(
                url=wanted.url,
                version=wanted.version,
                running=0 if replica is None else len(replica.running),
                down=replica is not None and replica.down,
                asleep=replica is not None and replica.asleep,
            )
        )
    return ShownPolicy(
        run=run,
        paused=state.paused is not None,
        mode=state.paused,
        frozen=pool.gate.frozen,
        held=pool.gate.held + sum(int(node.load.get("held", 0)) for node in _others(parts)),
        running=_running(parts, run),
        replicas=replicas,
    )


def routes(router: APIRouter, parts: Parts) -> None:
    steering = parts.rollout.steering

    @router.get("/policy", tags=["policy"], responses=problems())
    async def policy(run: OfRun = None) -> ShownPolicy:
        return shown(parts, run or DEFAULT_RUN)

    @router.post("/policy", tags=["policy"], responses=problems(400, 404, 413, 504))
    async def new_policy(body: NewPolicy, run: OfRun = None) -> ShownPolicy:
        """The weights have changed: of one replica, or of all."""
        run = body.run or run or DEFAULT_RUN
        if not await steering.set_version(run, body.version, body.replica, _IN_FORCE):
            raise _no_replica(parts, run, body.replica)
        return shown(parts, run)

    @router.post("/policy/pause", tags=["policy"], responses=problems(400, 409, 413, 502, 504))
    async def pause(body: Pause | None = None, run: OfRun = None) -> ShownPolicy:
        """Holds generation. New calls wait until it is resumed."""
        wanted = body or Pause()
        run = _own(parts, wanted.run or run)
        await steering.pause(run, wanted.mode, wanted.timeout)
        return shown(parts, run)

    @router.post("/policy/resume", tags=["policy"], responses=problems(400, 409, 413, 502, 504))
    async def resume(body: OfOneRun | None = None, run: OfRun = None) -> ShownPolicy:
        run = _own(parts, (body or OfOneRun()).run or run)
        await steering.resume(run, _IN_FORCE)
        return shown(parts, run)

    @router.get("/engines", tags=["engines"], responses=problems())
    async def engines(run: OfRun = None) -> ShownPolicy:
        """A run's engines; a run without any of its own uses those of `default`."""
        return shown(parts, run or DEFAULT_RUN)

    @router.post("/engines", tags=["engines"], responses=problems(400, 413, 504))
    async def add_engine(body: NewEngine, run: OfRun = None) -> ShownPolicy:
        """One more replica. With its first one, a run has engines of its own."""
        run = body.run or run or DEFAULT_RUN
        await steering.add_replica(run, body.url, body.version, _IN_FORCE)
        return shown(parts, run)

    @router.delete("/engines", tags=["engines"], responses=problems(404, 504))
    async def remove_engine(url: Annotated[str, Query(max_length=2000)], run: OfRun = None) -> ShownPolicy:
        """It gets no more calls; those that run there end there."""
        run = run or DEFAULT_RUN
        if not await steering.remove_replica(run, url, _IN_FORCE):
            raise _no_replica(parts, run, url)
        return shown(parts, run)


def _state(parts: Parts, run: str) -> PoolState:
    pools = parts.rollout.steering.engines.pools
    return pools.get(run) or pools[DEFAULT_RUN]


def _own(parts: Parts, run: str | None) -> str:
    """Who shares engines can't hold them for the others."""
    if run is not None and run not in parts.rollout.steering.engines.pools:
        message = f"Run {run} has no engines of its own: POST /engines gives it some, or pause those of {DEFAULT_RUN}."
        raise HTTPException(409, message)
    return run or DEFAULT_RUN


def _others(parts: Parts) -> list[NodeView]:
    return [node for node in parts.rollout.nodes() if node.node_id != parts.node_id]


def _running(parts: Parts, run: str) -> int:
    """Calls at the engines; of other nodes, those of all runs."""
    here = sum(len(replica.running) for replica in parts.pools.of(run).replicas)
    return here + sum(int(node.load.get("calls", 0)) for node in _others(parts))


def _no_replica(parts: Parts, run: str, url: str | None) -> HTTPException:
    known = ", ".join(replica.url for replica in _state(parts, run).replicas) or "none"
    return HTTPException(404, f"There is no replica {url} in the run {run}; known: {known}.")
