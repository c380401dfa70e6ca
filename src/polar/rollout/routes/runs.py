"""Runs: experiments that share the service, and what each may use of it."""

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Path
from pydantic import BaseModel, Field

from polar.config import Compat
from polar.engines.base import RunEngine
from polar.errors import ConfigError
from polar.plugins import names
from polar.rollout.routes.bodies import Body, RunName
from polar.rollout.routes.openapi import error_responses
from polar.rollout.routes.service_parts import ServiceParts
from polar.rollout.runs import Quotas

_APPLY_SECONDS = 60.0  # seconds that nodes have to apply something

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


def add_routes(router: APIRouter, parts: ServiceParts) -> None:
    rollout = parts.rollout

    @router.get("/runs", tags=["runs"], responses=error_responses())
    async def all_runs() -> Runs:
        """Every run that has quotas, or engines of its own."""
        return Runs(runs={run: _describe_run(run, quotas) for run, quotas in rollout.quotas().items()})

    @router.put("/runs/{run}", tags=["runs"], responses=error_responses(400, 413, 502, 504))
    async def set_quotas(run: Annotated[RunName, Path()], body: RunQuotas) -> RunQuotas:
        quotas = Quotas(body.max_running, body.max_queued, body.batch, body.max_lag or 0)
        await rollout.set_quotas(run, quotas)
        if "engine" in body.model_fields_set:
            engine = RunEngine(**(body.engine or EngineModel()).model_dump())
            if engine.kind is not None and engine.kind not in names("engines"):
                raise ConfigError(f"Unknown engine {engine.kind!r}. Available: {', '.join(names('engines'))}.")
            await rollout.engine_controller.set_engine(run, engine, _APPLY_SECONDS)
        if "compat" in body.model_fields_set:
            await rollout.set_compat(run, body.compat)
        return _describe_run(run, quotas)

    def _describe_run(run: str, quotas: Quotas) -> RunQuotas:
        engine = rollout.engine_controller.describe_engine(run)
        shown = None if engine == RunEngine() else EngineModel(**msgspec.to_builtins(engine))
        return RunQuotas(**msgspec.to_builtins(quotas), compat=rollout.compat(run), engine=shown)
