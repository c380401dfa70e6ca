"""The whole service in one process: what `polar up` runs.

Service ─► DataPlane (gateway, engines, store)
        ─► RolloutService (queue, leases, policy) ─► ControlPlane (the listener, a thread of its own)
        ─► Node, perhaps (runs sessions)
"""

from polar.service.service import Service

__all__ = ["Service"]
