"""New weights into the engines of a run, with labels that are right at every moment, and the proof that they are there.

    prepare ─► freeze ─► every replica loads ─► POST /policy ─► resume ─► probe

Until the first replica is told to load, nothing has changed, and a failure lets generation go on as it was. From then
on weights and labels may disagree, so whatever fails leaves generation standing still: the service keeps that through
restarts, and the next update sets it going. An engine that is away is waited for.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import aiohttp
from msgspec import Struct, field

from polar import backoff
from polar.client.async_client import AsyncClient, ClientError
from polar.config import EngineSettings
from polar.engines.base import Engine
from polar.engines.http_client import EngineHttpClient
from polar.errors import EngineError, PolarError
from polar.plugins import load
from polar.train.weight_sync.probe import Difference, Probe, ProbeSample
from polar.train.weight_sync.transports import WeightTransport

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

T = TypeVar("T")
_FIRST_RETRY_SECONDS, _MAX_RETRY_SECONDS = 0.2, 5.0  # seconds between two tries at an engine that is away
_UNAVAILABLE_STATUSES = (
    502,
    504,
)  # the service's word for engines and nodes that do not do what they are told, or not yet


class SyncError(PolarError):
    """Engines did not get their weights. `paused`: generation stands still, until an update succeeds. `unstopped`: why
    it could not be brought to that, though nobody knows the weights."""

    def __init__(self, message: str, *, paused: bool, pause_failure: str | None = None) -> None:
        rest = "Generation stands still until an update succeeds." if paused else "Generation goes on as before."
        if pause_failure is not None:
            rest = f"Generation can't be stopped, and goes on with weights that nobody knows: {pause_failure}"
        super().__init__(f"{message} {rest}")
        self.paused = paused


class ProbeFailedError(SyncError):
    """An engine samples with other weights than the trainer's, under their version: never use that version again."""

    def __init__(self, message: str, version: int, *, paused: bool, pause_failure: str | None = None) -> None:
        super().__init__(message, paused=paused, pause_failure=pause_failure)
        self.version = version


class _WeightMismatchError(PolarError):
    """An engine and the trainer say different things of the same tokens."""


class SyncReport(Struct):
    """Of all replicas together."""

    version: int
    replicas: int
    difference: Difference  # between engine and trainer
    previous_difference: Difference | None = None  # between the weights that the engines had before and the trainer
    is_conclusive: bool = False  # the weights from before would not have passed
    seconds: dict[str, float] = field(default_factory=dict)  # by step
    paused_seconds: float = 0.0  # seconds without generation
    lost_replicas: list[str] = field(
        default_factory=list
    )  # replicas that had other weights by then than they were given last


class WeightSync:
    """The engines of the client's run. One update at a time."""

    def __init__(
        self,
        client: AsyncClient,
        transport: WeightTransport,
        engine: EngineSettings,
        probe: Probe,
        *,
        patience: float = 300,
    ) -> None:
        """`engine` has their kind, model and key; `patience` is how many seconds one that is away is waited for."""
        self._client = client
        self._transport = transport
        self._settings = engine
        self._probe = probe
        self._patience = patience
        self._replicas: dict[str, _Replica] = {}

    async def close(self) -> None:
        for replica in self._replicas.values():
            await replica.close()
        self._replicas = {}
        self._transport.close()

    async def check(self, version: int) -> SyncReport:
        """Whether the engines have the weights that the trainer has, without an update. Raises SyncError."""
        if (await self._client.policy())["paused"]:
            raise SyncError("The engines can't be looked at: an update of their weights did not end.", paused=True)
        return await self._probe_replicas(await self._list_replicas(), version, {}, stop=False)

    async def update(self, weights: "Mapping[str, Tensor]", version: int) -> SyncReport:
        """Raises SyncError. It may be called again then: with the same version, or after ProbeFailedError a larger
        one."""
        seconds: dict[str, float] = {}
        replicas = await self._list_replicas()
        lost = await self._find_lost_replicas(replicas)
        with _timed(seconds, "prepare"):
            await asyncio.to_thread(self._transport.prepare, weights, version)
        began = time.monotonic()
        with _timed(seconds, "freeze"):
            await self._freeze(replicas)
        with _timed(seconds, "load"):
            await self._load(replicas, version)
        with _timed(seconds, "policy"):
            for replica in replicas:  # by name: one that has come meanwhile has other weights
                announced = partial(self._client.set_policy, version, replica.url)
                await self._call_service(announced, f"{replica.url} has version {version}, which can't be announced")
        with _timed(seconds, "resume"):
            await self._call_service(self._client.resume, "Generation can't be resumed")
        stood_still = time.monotonic() - began
        self._transport.release_previous(version)
        report = await self._probe_replicas(replicas, version, seconds, stop=True)
        report.paused_seconds, report.lost_replicas = stood_still, lost
        return report

    # Steps

    async def _list_replicas(self) -> list["_Replica"]:
        """The run's replicas as the service knows them now."""
        urls = [str(replica["url"]) for replica in (await self._client.engines())["replicas"]]
        for gone in self._replicas.keys() - urls:
            await self._replicas.pop(gone).close()
        for url in urls:
            if url not in self._replicas:
                self._replicas[url] = _Replica(url, self._settings)
        if not urls:
            raise SyncError(f"The run {self._client.run} has no engines: POST /engines gives it some.", paused=False)
        return [self._replicas[url] for url in urls]

    async def _find_lost_replicas(self, replicas: list["_Replica"]) -> list[str]:
        """Those that say that they have something else than they were given last: started again meanwhile, most likely.
        One that can't be asked is left to the steps that need it."""
        given = [replica for replica in replicas if replica.loaded_version is not None]
        answers = await asyncio.gather(
            *(self._transport.read_version(replica.http) for replica in given), return_exceptions=True
        )
        lost = []
        for replica, held in zip(given, answers, strict=True):
            if isinstance(held, BaseException):
                if not isinstance(held, EngineError):
                    raise held
            elif held != replica.loaded_version:
                lost.append(replica.url)
                log.warning(
                    "%s was given version %s and says that it has %s: it has lost its weights, and what it has sampled "
                    "since then may be labelled wrongly",
                    replica.url,
                    replica.loaded_version,
                    "none of ours" if held is None else f"version {held}",
                )
        return lost

    async def _freeze(self, replicas: list["_Replica"]) -> None:
        """Calls that run stand still; where an engine can't do that, they are waited for."""
        try:
            await self._retry_while_away(self._client.pause)
            if not all([await replica.is_paused() for replica in replicas]):
                await self._client.pause("drain")
        except (ClientError, EngineError) as error:
            refused = isinstance(error, ClientError) and error.status is not None and 400 <= error.status < 500
            try:
                if not refused:
                    await self._client.resume()
            except ClientError as again:
                raise SyncError(f"Generation can't be paused ({error}), nor resumed: {again}", paused=True) from again
            raise SyncError(f"Generation can't be paused: {error}", paused=False) from error

    async def _load(self, replicas: list["_Replica"], version: int) -> None:
        answers = await asyncio.gather(
            *(self._retry_while_away(partial(self._load_replica, replica, version)) for replica in replicas),
            return_exceptions=True,
        )
        for replica, answer in zip(replicas, answers, strict=True):
            if isinstance(answer, EngineError):
                message = f"{replica.url} did not take the weights of version {version}: {answer}"
                raise SyncError(message, paused=True) from answer
            if answer is not None:
                raise answer

    async def _load_replica(self, replica: "_Replica", version: int) -> None:
        await self._transport.load(replica.http, version)
        held = await self._transport.read_version(replica.http)
        if held != version:
            raise EngineError(f"It says that it has version {held}.")
        replica.loaded_version = version

    async def _call_service(self, step: Callable[[], Awaitable[object]], failure_message: str) -> None:
        try:
            await self._retry_while_away(step)
        except ClientError as error:
            raise SyncError(f"{failure_message}: {error}", paused=True) from error

    async def _probe_replicas(
        self, replicas: list["_Replica"], version: int, seconds: dict[str, float], *, stop: bool
    ) -> SyncReport:
        """`stop`: where an engine fails, nothing more is to be sampled with weights that nobody knows."""
        with _timed(seconds, "probe"):
            earlier = [sample for replica in replicas for sample in replica.samples]
            before = await self._probe.measure_difference(earlier) if earlier else None
            try:
                found = await self._compare_replicas(replicas, version)
            except (EngineError, _WeightMismatchError) as error:
                unstopped = await self._try_pause() if stop else None
                paused = stop and unstopped is None
                if isinstance(error, _WeightMismatchError):
                    raise ProbeFailedError(str(error), version, paused=paused, pause_failure=unstopped) from error
                message = f"Nobody knows which weights the engines have: {error}"
                raise SyncError(message, paused=paused, pause_failure=unstopped) from error
        apart = before is not None and not before.is_within(self._probe.tolerance)
        return SyncReport(version, len(replicas), found, before, apart, seconds)

    async def _compare_replicas(self, replicas: list["_Replica"], version: int) -> Difference:
        taken = [self._retry_while_away(partial(self._probe.sample, replica.engine)) for replica in replicas]
        samples = await asyncio.gather(*taken, return_exceptions=True)
        found = []
        for replica, sample in zip(replicas, samples, strict=True):
            if isinstance(sample, BaseException):
                raise sample
            replica.samples = sample
            difference = await self._probe.measure_difference(sample)
            found.append(difference)
            allowed = self._probe.tolerance
            if not difference.is_within(allowed):
                raise _WeightMismatchError(
                    f"{replica.url} does not have the trainer's weights of version {version}: log-probabilities differ "
                    f"by {difference.largest:.3g} at most and {difference.mean:.3g} in the mean, and "
                    f"{allowed.largest:g} and {allowed.mean:g} are allowed; docs/weights.md tells what to look at."
                )
        return Difference.combine(found)

    async def _try_pause(self) -> str | None:
        """Stops generation. Where that fails: why."""
        try:
            await self._client.pause()
        except ClientError as error:
            return str(error)
        return None

    async def _retry_while_away(self, step: Callable[[], Awaitable[T]]) -> T:
        """Again and again while an engine is away: it may be on its way up."""
        deadline = time.monotonic() + self._patience
        for delay in backoff.backoff_delays(_FIRST_RETRY_SECONDS, _MAX_RETRY_SECONDS):
            try:
                return await step()
            except (EngineError, ClientError) as error:
                if not _is_away(error) or time.monotonic() + delay > deadline:
                    raise
            await asyncio.sleep(delay)
        raise AssertionError  # there is always another delay


def _is_away(error: EngineError | ClientError) -> bool:
    if isinstance(error, ClientError):
        return error.status in _UNAVAILABLE_STATUSES
    return error.kind == "overloaded" or isinstance(error.__cause__, aiohttp.ClientError | TimeoutError | OSError)


class _Replica:
    def __init__(self, url: str, settings: EngineSettings) -> None:
        self.url = url
        self.engine: Engine = load("engines", settings.kind)(url, settings)
        self.http = EngineHttpClient(self.engine.url, settings.api_key, settings.timeout)
        self.samples: list[ProbeSample] = []  # of the last probe
        self.loaded_version: int | None = None  # the version of the weights that it took last

    async def is_paused(self) -> bool:
        """One that is away has no calls that could run on. vLLM says of one that is frozen that it sleeps."""
        try:
            return await self.engine.get_state() in ("frozen", "asleep")
        except EngineError as error:
            if _is_away(error):
                return True
            raise

    async def close(self) -> None:
        await self.engine.close()
        await self.http.close()


@contextmanager
def _timed(seconds: dict[str, float], step: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    seconds[step] = time.monotonic() - began
