"""The control plane over real parts: a store, the rollout service and its routes; nodes are played by the tests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
from fastapi import FastAPI

from polar.config import EngineSettings, ServerSettings
from polar.engines.fleet import EngineFleet
from polar.gateway.metrics import GatewayMetrics
from polar.gateway.session_registry import SessionRegistry
from polar.records.session import Session, Verdict
from polar.records.task import TaskRequest
from polar.rollout.callbacks import Callbacks
from polar.rollout.protocol import Heartbeat, JoinRequest, Lease, SessionOutcome
from polar.rollout.result_pages import ResultPages
from polar.rollout.routes.app import create_app
from polar.rollout.routes.service_parts import ServiceParts
from polar.rollout.service import RolloutService
from polar.store import open_store
from polar.store.base import Store
from polar.telemetry.service_metrics import VerifyMetrics
from polar.testing.conversations import ConversationBuilder, make_text_parts
from polar.trajectory.checker import SessionChecker

ENGINE = "http://127.0.0.1:1"
NODE = "n1"


def task(task_id: str = "t", **fields: Any) -> dict[str, Any]:
    return {"task_id": task_id, "instruction": "do it", "runtime": {"backend": "local"}, **fields}


@dataclass
class Served:
    app: FastAPI
    http: httpx.AsyncClient
    rollout: RolloutService
    store: Store
    sessions: SessionRegistry
    callbacks: Callbacks

    async def submit(self, *tasks: dict[str, Any]) -> None:
        answers = await self.rollout.submit([TaskRequest.model_validate(one) for one in tasks])
        assert all(hasattr(answer, "status") for answer in answers), answers

    async def join(self, node_id: str = NODE, slots: int = 100) -> None:
        await self.rollout.lease_manager.join(JoinRequest(node_id, node_id, ["local"], slots, store="here"))

    async def work(self, node_id: str = NODE, room: int = 100) -> list[Lease]:
        return await self.rollout.lease_manager.lease(node_id, [], room)

    async def run(
        self, lease: Lease, *, name: str = "s", turns: int = 1, dialect: str = "openai_chat", **ended: Any
    ) -> str:
        """A session as a node leaves it: calls in the store, and its end told."""
        session_id = f"{name}-{lease.task_id}-{lease.sample}"
        talk = ConversationBuilder(session_id, dialect)
        bare = dialect == "openai_completions"
        fields = {"model": b'"m"', "prompt": b'"List the files."'} if bare else None
        messages: list[dict[str, Any]] = [] if bare else [{"role": "user", "content": "List the files."}]
        context = np.arange(5, dtype=np.int32)
        for turn in range(turns):
            talk.add_call(messages, make_text_parts(f"None {turn}."), fields=fields, prompt_ids=context)
            context = np.concatenate([context, np.arange(3, dtype=np.int32) + 10 * turn, np.array([7], np.int32)])
            messages += [{"role": "assistant", "content": f"None {turn}."}, {"role": "user", "content": "Again."}]
        await self.store.create_session(
            Session(session_id, session_id.encode(), 1.0, run=lease.run, metadata={"task_id": lease.task_id})
        )
        for exchange in talk.exchanges:
            await self.store.append(exchange)
        told = SessionOutcome(lease.work_id, lease.fence, session_id, **({"reward": 1.0} | ended))
        await self.store.end_session(
            session_id, ended_at=5.0, verdict=Verdict(told.reward, told.reason, evidence=told.evidence)
        )
        await self.rollout.lease_manager.finish(NODE, [told])
        return session_id

    async def run_all(self, **ended: Any) -> list[str]:
        await self.join()
        return [await self.run(lease, **ended) for lease in await self.work()]


@asynccontextmanager
async def served(
    data: Path, *, token: str | None = None, verify_share: float = 1.0, store_url: str | None = None, **server: Any
) -> AsyncIterator[Served]:
    settings = ServerSettings.model_validate({"beat_seconds": 0.05, "lease_seconds": 600, **server, "token": token})
    store = open_store(store_url or f"sqlite:{data / 'polar.db'}")
    pools = EngineFleet(EngineSettings.model_validate({"kind": "vllm", "urls": [ENGINE]}))
    sessions = SessionRegistry(store)
    try:
        async with RolloutService(
            store, settings, store_id="here", replicas=[ENGINE], versions=store.read_policy_versions
        ) as rollout:
            metrics = GatewayMetrics()
            pages = ResultPages(rollout, store, SessionChecker(verify_share, VerifyMetrics(metrics.registry)))
            async with Callbacks(rollout, pages, settings) as callbacks:
                parts = ServiceParts(
                    settings=settings,
                    rollout=rollout,
                    pages=pages,
                    callbacks=callbacks,
                    store=store,
                    sessions=sessions,
                    pools=pools,
                    metrics=metrics,
                    gateway_url="http://127.0.0.1:2",
                )
                app = create_app(parts)
                transport = httpx.ASGITransport(app, raise_app_exceptions=True)
                async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
                    yield Served(app, http, rollout, store, sessions, callbacks)
            rollout.events.close()
    finally:
        await pools.close()
        await store.close()


async def beats(it: Served, node_id: str = NODE, **load: Any) -> None:
    """A node that does whatever it is told at once."""
    applied = -1
    while True:
        orders = await it.rollout.lease_manager.heartbeat(
            node_id, Heartbeat(holding=[], load=load, applied=applied, seen=applied)
        )
        if orders.engines is not None:
            applied = orders.engines.generation


@asynccontextmanager
async def beating(it: Served, node_id: str = NODE, **load: Any) -> AsyncIterator[None]:
    await it.join(node_id)
    task = asyncio.create_task(beats(it, node_id, **load))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def page_of(answer: httpx.Response) -> tuple[list[dict[str, Any]], int]:
    assert answer.status_code == 200, answer.text
    page = msgspec.json.decode(answer.content)
    return page["results"], page["cursor"]
