"""What the routes are made of: the service's own parts, given by whoever starts it."""

from dataclasses import dataclass

from polar.config import ServerSettings
from polar.engines.fleet import EngineFleet
from polar.gateway.metrics import GatewayMetrics
from polar.gateway.session_registry import SessionRegistry
from polar.rollout.callbacks import Callbacks
from polar.rollout.result_pages import ResultPages
from polar.rollout.service import RolloutService
from polar.store.base import Store


@dataclass(frozen=True)
class ServiceParts:
    settings: ServerSettings
    rollout: RolloutService
    pages: ResultPages
    callbacks: Callbacks
    store: Store
    sessions: SessionRegistry
    pools: EngineFleet
    metrics: GatewayMetrics
    gateway_url: str
    node_id: str | None = None
    """Of the node in this process, whose calls are those of `pools`."""
