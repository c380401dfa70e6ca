"""Runs: experiments that share the service, and what each may use of it."""

from typing import Annotated

import msgspec
from fastapi import APIRouter, Path
from pydantic import BaseModel, Field

from polar.config import Compat
from polar.rollout.routes.bodies import Body, RunName
from polar.rollout.routes.openapi import error_responses
from polar.rollout.routes.service_parts import ServiceParts
from polar.rollout.runs import Quotas

_Limit = Annotated[int | None, Field(ge=0, lt=2**31)]


class RunQuotas(Body):
    """Null is without limit. The four limits are set together: what is left out has none. `compat` stays as it is
    where it is left out."""

    max_running: _Limit = Field(None, description="sessions at the same time")
    max_queued: _Limit = Field(None, description="sessions that wait; more are refused with 429")
    batch: Annotated[int | None, Field(gt=0, lt=2**31)] = Field(
        None, description="sessions that the trainer takes at once"
    )
    max_lag: _Limit = Field(None, description="batches that sessions may be ahead of the trainer [default: 0]")
    compat: Compat | None = Field(None, description="whose meaning its tasks have [default: the server's]")


class Runs(BaseModel):
    runs: dict[str, RunQuotas]


def add_routes(router: APIRouter, parts: ServiceParts) -> None:
    rollout = parts.rollout

    @router.get("/runs", tags=["runs"], responses=error_responses())
    async def all_runs() -> Runs:
        """Every run that has quotas, or engines of its own."""
        return Runs(runs={run: _describe_run(run, quotas) for run, quotas in rollout.quotas().items()})

    @router.put("/runs/{run}", tags=["runs"], responses=error_responses(400, 413))
    async def set_quotas(run: Annotated[RunName, Path()], body: RunQuotas) -> RunQuotas:
        quotas = Quotas(body.max_running, body.max_queued, body.batch, body.max_lag or 0)
        await rollout.set_quotas(run, quotas)
        if "compat" in body.model_fields_set:
            await rollout.set_compat(run, body.compat)
        return _describe_run(run, quotas)

    def _describe_run(run: str, quotas: Quotas) -> RunQuotas:
        return RunQuotas(**msgspec.to_builtins(quotas), compat=rollout.compat(run))
