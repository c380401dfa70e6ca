"""What the routes are made of: the service's own parts, given by whoever starts it."""

from dataclasses import dataclass

from polar.config import ServerSettings
from polar.engines.pools import Pools
from polar.gateway.metrics import Metrics
from polar.gateway.sessions import Sessions
from polar.rollout.callbacks import Callbacks
from polar.rollout.pages import Pages
from polar.rollout.rollout import Rollout
from polar.store.base import Store


@dataclass(frozen=True)
class Parts:
    settings: ServerSettings
    rollout: Rollout
    pages: Pages
    callbacks: Callbacks
    store: Store
    sessions: Sessions
    pools: Pools
    metrics: Metrics
    gateway_url: str
    node_id: str | None = None
    """Of the node in this process, whose calls are those of `pools`."""
