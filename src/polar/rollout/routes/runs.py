"""Runs: experiments that share the service. What each may use of it, its engines, and the policy that they hold.

What is asked of engines is answered when every node that is alive has it in force.
"""

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from fastapi import APIRouter, HTTPException, Path, Query
from pydantic import AfterValidator, BaseModel, Field

from polar.config import DEFAULT_RUN, Compat
from polar.engines.base import DesiredPool, RunEngine
from polar.errors import ConfigError
from polar.plugins import list_names
from polar.records.policy import PauseState
from polar.rollout.lease_manager import NodeView
from polar.rollout.routes.bodies import Body, RunName, describe_errors
from polar.rollout.routes.service_parts import ServiceParts
from polar.rollout.runs import Quotas

_Limit = Annotated[int | None, Field(ge=0, lt=2**31)]


class EngineModel(Body):
    """The kind and model of a run's engines. What is left out is as `[engine]` says; where kind or model are given, as
    the engines say."""

    kind: str | None = Field(None, max_length=100, description="vllm, sglang, ...")
    model: str | None = Field(None, max_length=2000, description="as its engines list it")
    tokenizer: str | None = Field(None, max_length=2000, description="folder or name, on the nodes")
    template_kwargs: dict[str, Any] | None = Field(None, description="variables of the chat template")


class RunQuotas(Body):
    """Null is without limit. The four limits are set together: what is left out has none. `compat` and `engine` stay as
    they are where they are left out."""

    max_running: _Limit = Field(None, description="sessions at the same time")
    max_queued: _Limit = Field(None, description="sessions that wait; more are refused with 429")
    batch: Annotated[int | None, Field(gt=0, lt=2**31)] = Field(
        None, description="sessions that the trainer takes at once"
    )
    max_lag: _Limit = Field(None, description="batches that sessions may be ahead of the trainer [default: 0]")
    compat: Compat | None = Field(None, description="whose meaning its tasks have [default: the server's]")
    engine: EngineModel | None = Field(None, description="what its engines are [default: as the server's settings say]")


class Runs(BaseModel):
    runs: dict[str, RunQuotas]


_APPLY_SECONDS = 60.0
"""For nodes to put something in force."""

Version = Annotated[int, Field(ge=0, lt=2**31)]


def _check_address(url: str) -> str:
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


Address = Annotated[str, AfterValidator(_check_address), Field(pattern=r"^https?://[!-~]+$", max_length=2000)]
RunQuery = Annotated[RunName | None, Query(description="the experiment whose engines are meant [default: default]")]


class RunBody(Body):
    run: RunName | None = Field(None, description="as in the query")


class PolicyUpdate(RunBody):
    version: Version
    replica: str | None = Field(None, description="the URL of one replica; default: all of the run's")


class PauseRequest(RunBody):
    mode: Literal["freeze", "hold", "drain", "sleep"] = Field(
        "freeze",
        description="freeze: running calls stand still, where the engine can; hold: they run on; drain: wait for them; "
        "sleep: wait for them, then the engines give their memory away",
    )
    timeout: float = Field(600, gt=0, le=3600, description="seconds to wait for it")


class EngineRequest(RunBody):
    url: Address
    version: Version | None = Field(None, description="of the policy that it holds [default: as known, else 0]")


class ReplicaInfo(BaseModel):
    """What runs there, and how it is, as far as this process knows."""

    url: str
    version: int
    running: int = Field(description="calls of this process")
    down: bool = Field(description="it did not answer, and is left alone for a while")
    asleep: bool
    refusal: str | None = Field(None, description="why it is not called: it has another model than the run")


class PolicyInfo(BaseModel):
    """The engines of a run, and the policy that they hold."""

    run: str
    paused: bool
    mode: PauseState | None = Field(description="of the pause; settle: it is about to end")
    frozen: bool = Field(description="running calls stand still")
    held: int = Field(description="calls that wait for generation to go on; at other nodes, of all runs")
    running: int = Field(description="calls at the engines; of other nodes, those of all runs")
    replicas: list[ReplicaInfo]


def describe_policy(parts: ServiceParts, run: str) -> PolicyInfo:
    """What runs at each replica is known of this process alone; `running` counts every node."""
    state = _get_pool(parts, run)
    pool = parts.pools.get_pool(run)
    local_replicas = {replica.url: replica for replica in pool.replicas}
    replicas = []
    for desired in state.replicas:
        replica = local_replicas.get(desired.url)
        replicas.append(
            ReplicaInfo(
                url=desired.url,
                version=desired.version,
                running=0 if replica is None else len(replica.running),
                down=replica is not None and replica.down,
                asleep=replica is not None and replica.asleep,
                refusal=None if replica is None else replica.refusal,
            )
        )
    return PolicyInfo(
        run=run,
        paused=state.paused is not None,
        mode=state.paused,
        frozen=pool.gate.frozen,
        held=pool.gate.held + sum(int(node.load.get("held", 0)) for node in _list_other_nodes(parts)),
        running=_count_running_calls(parts, run),
        replicas=replicas,
    )


def add_routes(router: APIRouter, parts: ServiceParts) -> None:
    _add_quota_routes(router, parts)
    _add_engine_routes(router, parts)


def _add_quota_routes(router: APIRouter, parts: ServiceParts) -> None:
    rollout = parts.rollout

    @router.get("/runs", tags=["runs"], responses=describe_errors())
    async def all_runs() -> Runs:
        """Every run that has quotas, or engines of its own."""
        return Runs(runs={run: _describe_run(run, quotas) for run, quotas in rollout.list_quotas().items()})

    @router.put("/runs/{run}", tags=["runs"], responses=describe_errors(400, 413, 502, 504))
    async def set_quotas(run: Annotated[RunName, Path()], body: RunQuotas) -> RunQuotas:
        quotas = Quotas(body.max_running, body.max_queued, body.batch, body.max_lag or 0)
        await rollout.set_quotas(run, quotas)
        if "engine" in body.model_fields_set:
            engine = RunEngine(**(body.engine or EngineModel()).model_dump())
            if engine.kind is not None and engine.kind not in list_names("engines"):
                raise ConfigError(f"Unknown engine {engine.kind!r}. Available: {', '.join(list_names('engines'))}.")
            await rollout.engine_controller.set_engine(run, engine, _APPLY_SECONDS)
        if "compat" in body.model_fields_set:
            await rollout.set_compat(run, body.compat)
        return _describe_run(run, quotas)

    def _describe_run(run: str, quotas: Quotas) -> RunQuotas:
        engine = rollout.engine_controller.describe_engine(run)
        shown = None if engine == RunEngine() else EngineModel(**msgspec.to_builtins(engine))
        return RunQuotas(**msgspec.to_builtins(quotas), compat=rollout.get_compat(run), engine=shown)


def _add_engine_routes(router: APIRouter, parts: ServiceParts) -> None:
    controller = parts.rollout.engine_controller

    @router.get("/policy", tags=["policy"], responses=describe_errors())
    async def policy(run: RunQuery = None) -> PolicyInfo:
        return describe_policy(parts, run or DEFAULT_RUN)

    @router.post("/policy", tags=["policy"], responses=describe_errors(400, 404, 413, 504))
    async def new_policy(body: PolicyUpdate, run: RunQuery = None) -> PolicyInfo:
        """The weights have changed: of one replica, or of all."""
        run = body.run or run or DEFAULT_RUN
        if not await controller.set_version(run, body.version, body.replica, _APPLY_SECONDS):
            raise _make_unknown_replica_error(parts, run, body.replica)
        return describe_policy(parts, run)

    @router.post("/policy/pause", tags=["policy"], responses=describe_errors(400, 409, 413, 502, 504))
    async def pause(body: PauseRequest | None = None, run: RunQuery = None) -> PolicyInfo:
        """Holds generation. New calls wait until it is resumed."""
        wanted = body or PauseRequest()
        run = _require_own_engines(parts, wanted.run or run)
        await controller.pause(run, wanted.mode, wanted.timeout)
        return describe_policy(parts, run)

    @router.post("/policy/resume", tags=["policy"], responses=describe_errors(400, 409, 413, 502, 504))
    async def resume(body: RunBody | None = None, run: RunQuery = None) -> PolicyInfo:
        run = _require_own_engines(parts, (body or RunBody()).run or run)
        await controller.resume(run, _APPLY_SECONDS)
        return describe_policy(parts, run)

    @router.get("/engines", tags=["engines"], responses=describe_errors())
    async def engines(run: RunQuery = None) -> PolicyInfo:
        """A run's engines; a run without any of its own uses those of `default`."""
        return describe_policy(parts, run or DEFAULT_RUN)

    @router.post("/engines", tags=["engines"], responses=describe_errors(400, 413, 502, 504))
    async def add_engine(body: EngineRequest, run: RunQuery = None) -> PolicyInfo:
        """One more replica. With its first one, a run has engines of its own. One that has another model than the
        run is refused (502), and does not stay."""
        run = body.run or run or DEFAULT_RUN
        await controller.add_replica(run, body.url, body.version, _APPLY_SECONDS)
        return describe_policy(parts, run)

    @router.delete("/engines", tags=["engines"], responses=describe_errors(404, 504))
    async def remove_engine(url: Annotated[str, Query(max_length=2000)], run: RunQuery = None) -> PolicyInfo:
        """It gets no more calls; those that run there end there."""
        run = run or DEFAULT_RUN
        if not await controller.remove_replica(run, url, _APPLY_SECONDS):
            raise _make_unknown_replica_error(parts, run, url)
        return describe_policy(parts, run)


def _get_pool(parts: ServiceParts, run: str) -> DesiredPool:
    pools = parts.rollout.engine_controller.engines.pools
    return pools.get(run) or pools[DEFAULT_RUN]


def _require_own_engines(parts: ServiceParts, run: str | None) -> str:
    """Who shares engines can't hold them for the others."""
    if run is not None and run not in parts.rollout.engine_controller.engines.pools:
        message = f"Run {run} has no engines of its own: POST /engines gives it some, or pause those of {DEFAULT_RUN}."
        raise HTTPException(409, message)
    return run or DEFAULT_RUN


def _list_other_nodes(parts: ServiceParts) -> list[NodeView]:
    return [node for node in parts.rollout.list_nodes() if node.node_id != parts.node_id]


def _count_running_calls(parts: ServiceParts, run: str) -> int:
    """Calls at the engines; of other nodes, those of all runs."""
    local = sum(len(replica.running) for replica in parts.pools.get_pool(run).replicas)
    return local + sum(int(node.load.get("calls", 0)) for node in _list_other_nodes(parts))


def _make_unknown_replica_error(parts: ServiceParts, run: str, url: str | None) -> HTTPException:
    known = ", ".join(replica.url for replica in _get_pool(parts, run).replicas) or "none"
    return HTTPException(404, f"There is no replica {url} in the run {run}; known: {known}.")
