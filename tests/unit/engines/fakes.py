"""An engine that does what a test tells it to, and a call that remembers what it was told."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from polar.engines.base import Capabilities, Chunk, EngineState, TokenPrompt, normalize_engine_url
from polar.engines.pool import EnginePool
from polar.engines.replica import Replica
from polar.errors import EngineError
from polar.types import Request, SamplingParams

REQUEST = Request("m", [])


class FakeEngine:
    """Yields one chunk when `begins` is set and another when `ends` is; both are, unless a test clears them."""

    def __init__(self, url: str = "http://engine", settings: Any = None) -> None:
        self.url = normalize_engine_url(url)
        self.capabilities = Capabilities()
        self.begins, self.ends = asyncio.Event(), asyncio.Event()
        self.begins.set()
        self.ends.set()
        self.orders: list[str] = []
        self.failing: dict[str, EngineError] = {}  # by order
        self.calls = 0
        self.left = 0  # calls that have ended
        self.others = 0  # calls that are not ours
        self.can_sleep = True
        self.can_freeze = True
        self.stands: EngineState | None = "running"  # as it says when it is asked
        self.made = 0  # connections
        self.process: float | None = None  # when it was started, as it says
        self.closed = False

    async def start(self) -> Capabilities:
        self._obey("start")
        return self.capabilities

    async def generate(
        self,
        request: Request,
        *,
        stream: bool,
        prompt: TokenPrompt | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        self.calls += 1
        try:
            await self.begins.wait()
            self._obey("generate")
            yield Chunk(ids=[1])
            await self.ends.wait()
            self._obey("finish")
            yield Chunk(ids=[2], finish_reason="stop")
        finally:
            self.left += 1

    def find_tokenizer_folder(self) -> str | None:
        return None

    def apply_sampling_defaults(self, sampling: SamplingParams) -> SamplingParams:
        return sampling

    async def count_tokens(self, request: Request) -> int:
        self._obey("count")
        return 7

    async def tokenize(self, text: str) -> list[int] | None:
        return None

    async def reports_version_spans(self) -> bool:
        return False

    async def count_running_calls(self) -> int | None:
        return self.others

    @property
    def connections_opened(self) -> int:
        return self.made

    async def get_process_start_time(self) -> float | None:
        if "process_start" in self.failing:
            raise self.failing["process_start"]
        return self.process

    async def get_state(self) -> EngineState | None:
        if "standing" in self.failing:
            raise self.failing["standing"]
        return self.stands

    async def freeze(self) -> bool:
        self._obey("freeze")
        return self.can_freeze

    async def thaw(self) -> None:
        self._obey("thaw")

    async def sleep(self) -> bool:
        self._obey("sleep")
        return self.can_sleep

    async def wake(self) -> None:
        self._obey("wake")

    async def close(self) -> None:
        self.closed = True

    def _obey(self, order: str) -> None:
        self.orders.append(order)
        if order in self.failing:
            raise self.failing[order]

    @property
    def switched(self) -> list[str]:
        return [order for order in self.orders if order in ("freeze", "thaw", "sleep", "wake")]


class FakeCall:
    def __init__(self, pool: EnginePool, group: str = "group", home: Replica | None = None) -> None:
        self.home = home
        self.ids: list[int] = []
        self.versions: list[tuple[int, bool]] = []
        self.stood_still = 0
        self._pool = pool
        self._group = group
        self.done = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        chunks = self._pool.generate(
            REQUEST, stream=True, group=self._group, preferred=self.home, call=self, on_chosen=self._chosen
        )
        async for chunk in chunks:
            self.ids += chunk.ids

    def _chosen(self, replica: Replica) -> None:
        self.home = replica

    def on_version_changed(self, version: int, *, frozen: bool) -> None:
        self.versions.append((version, frozen))

    def on_frozen(self) -> None:
        self.stood_still += 1

    def on_thawed(self) -> None:
        pass


async def run_event_loop(count: int = 20) -> None:
    """Lets everything happen that can."""
    for _ in range(count):
        await asyncio.sleep(0)


def make_unreachable_error() -> EngineError:
    return EngineError("It can't be reached.", kind="overloaded", retry_elsewhere=True)


def make_timeout_error() -> EngineError:
    return EngineError("It did not answer in time.", kind="timeout", retry_elsewhere=True)


def make_engine_error() -> EngineError:
    return EngineError("It is out of memory.", retry_elsewhere=True)
