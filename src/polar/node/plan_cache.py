"""Plans of the tasks that a rollout server gives to this node: samples of a task share one."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from pydantic import ValidationError

from polar.errors import ConfigError
from polar.node.task_plan import TaskPlan
from polar.records.task import TaskRequest
from polar.rollout.protocol import Lease

_MAX_PLANS = 256


class PlanCache:
    def __init__(self, plan: Callable[[TaskRequest], Awaitable[TaskPlan]]) -> None:
        self._plan = plan
        self._plans: OrderedDict[str, asyncio.Future[TaskPlan]] = OrderedDict()

    async def get(self, lease: Lease) -> TaskPlan:
        """Raises ConfigError where the task can't be run here."""
        planning = self._plans.get(lease.digest)
        if planning is None:
            try:
                task = TaskRequest.model_validate_json(bytes(lease.request))
            except ValidationError as error:
                raise ConfigError(f"This node can't read the task; is it older than the server? {error}") from error
            planning = self._plans[lease.digest] = asyncio.ensure_future(self._plan(task))
            if len(self._plans) > _MAX_PLANS:
                self._plans.popitem(last=False)
        try:
            return await asyncio.shield(planning)
        except Exception:
            self._plans.pop(lease.digest, None)  # what is missing may be there the next time
            raise
