"""The feed of results: what has ended, in that order, from a cursor on."""

from typing import Annotated

from fastapi import APIRouter, HTTPException, Query
from fastapi.responses import Response
from pydantic import BaseModel

from polar.plugins import names
from polar.records.result import GroupResult, NumberedResult, ResultUnit, SuspiciousFilter
from polar.rollout.routes.bodies import INT64_LIMIT, Name, RunName
from polar.rollout.routes.openapi import error_responses
from polar.rollout.routes.service_parts import ServiceParts
from polar.rollout.routes.tasks import stream_response


class Page(BaseModel):
    results: list[NumberedResult] | list[GroupResult]
    cursor: int


def add_routes(router: APIRouter, parts: ServiceParts) -> None:
    @router.get(
        "/rollout/results",
        tags=["results"],
        responses=error_responses()
        | {200: {"model": Page, "description": "A page of them, and where the next one begins"}},
    )
    async def results(
        run: Annotated[RunName, Query()] = "default",
        after: Annotated[int | None, Query(ge=0, lt=INT64_LIMIT, description="the cursor of the page before")] = None,
        wait: Annotated[float, Query(ge=0, le=60, description="seconds to wait where there is nothing yet")] = 0,
        limit: Annotated[int, Query(ge=1, le=1000, description="at most so many; large ones may be fewer")] = 100,
        unit: Annotated[ResultUnit, Query(description="sessions, or tasks with all of their sessions")] = "session",
        builder: Annotated[str | None, Query(description="of the traces [default: the task's own]")] = None,
        suspicious: Annotated[
            SuspiciousFilter, Query(description="sessions with proven tampering: among the others, alone, or left out")
        ] = "keep",
        consumer: Annotated[
            Name | None,
            Query(
                description="a name under which the server remembers the cursor: `after` says that all up to it is "
                "taken; without `after`, the page goes on from there"
            ),
        ] = None,
    ) -> Response:
        """Sessions (or tasks) that have ended, in that order, with their trajectories. The cursor outlives restarts."""
        if builder is not None and builder not in names("builders"):
            raise HTTPException(422, f"There is no builder {builder}; known: {', '.join(names('builders'))}.")
        if consumer is not None:
            after = await parts.rollout.update_consumer(run, consumer, after, unit)
        pages = parts.pages.stream_page(
            run, after or 0, wait=wait, limit=limit, unit=unit, builder=builder, suspicious=suspicious
        )
        return await stream_response(pages)
