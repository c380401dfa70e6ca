"""The steps of an update of the engines' weights, for every trainer.

    prepare ─► freeze ─► every replica loads ─► label (POST /policy) ─► resume ─► probe

Who loads the weights differs. A trainer that owns its engines does it between `freeze` and `label` (`WeightUpdater`);
one that has the weights in its own process leaves it to a transport (`WeightSender`).

Until the first replica begins to load, nothing has changed, and a failure lets generation go on as it was. From then
on weights and labels may disagree, so whatever fails leaves generation standing still: the service keeps that through
restarts, and the next update sets it going. An engine that is away is waited for.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import aiohttp
from msgspec import Struct, field

from polar import backoff
from polar.client.async_client import AsyncClient, ClientError
from polar.config import EngineSettings
from polar.engines.base import Engine, normalize_engine_url
from polar.engines.http_client import EngineHttpClient
from polar.errors import ConfigError, EngineError
from polar.plugins import load
from polar.records.result import PauseMode
from polar.weight_sync.base import ProbeFailedError, SyncError, WeightMismatchError, WeightTransport
from polar.weight_sync.probe import Difference, Probe, ProbeSample, Scorer, choose_tolerance

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

T = TypeVar("T")
_FIRST_RETRY_SECONDS, _MAX_RETRY_SECONDS = 0.2, 5.0
"""Between two tries at an engine that is away."""
_UNAVAILABLE_STATUSES = (502, 504)
"""The service's answer where engines or nodes do not follow an order, or not yet."""
PATIENCE_SECONDS = 300.0
"""How long an engine that is away is waited for, unless the caller says otherwise."""


class WeightUpdater:
    """The engines of the client's run while their weights change. One update at a time.

    async with updater.updating(version):   # generation stands still, calls that run wait
        trainer_loads_weights()
    await updater.probe(score, ...)         # what the engines sample is what the trainer computes
    """

    def __init__(self, client: AsyncClient, *, patience: float = PATIENCE_SECONDS) -> None:
        self._client = client
        self._patience = patience

    async def attach(self, urls: Iterable[str], version: int) -> None:
        """Makes these the run's engines, and no others; all have the weights of `version`. Generation goes on, as
        `resume_if_paused` has it."""
        attached_urls = dict.fromkeys(map(normalize_engine_url, urls))
        if not attached_urls:
            raise ConfigError("The trainer has no engines to attach: start them first, or name their addresses.")
        for url in attached_urls:  # with its first one the run has engines of its own
            await self._client.add_engine(url, version)
        for url in await self.list_urls():
            if normalize_engine_url(url) not in attached_urls:
                await self._client.remove_engine(url)
        await self._client.set_policy(version)
        await self.resume_if_paused()

    async def list_urls(self) -> list[str]:
        """The run's engines as the service knows them now."""
        return [str(replica["url"]) for replica in (await self._client.engines())["replicas"]]

    async def resume_if_paused(self) -> None:
        """For a trainer that starts: where an earlier one did not live to end an update, generation stands still."""
        if (await self._client.policy())["paused"]:
            await self._client.resume()

    # An update, step by step

    @asynccontextmanager
    async def updating(self, version: int, mode: PauseMode = "freeze") -> AsyncIterator[None]:
        """Generation stands still within, while the trainer loads the weights of `version`. Where that fails,
        generation stays as it is: the weights are unknown then. The next update sets it going, or
        `resume_if_paused`."""
        await self.freeze(mode)
        yield
        await self.finish_update(version)

    async def freeze(
        self, mode: PauseMode = "freeze", *, is_frozen: Callable[[], Awaitable[bool]] | None = None
    ) -> None:
        """Calls that run stand still, or are waited for (`drain`). Where `is_frozen` says that engines can't stand
        still, calls are waited for as well. Raises SyncError; generation goes on then."""
        try:
            await self.retry_while_away(partial(self._client.pause, mode))
            if is_frozen is not None and not await is_frozen():
                await self._client.pause("drain")
        except (ClientError, EngineError) as error:
            is_refused = isinstance(error, ClientError) and error.status is not None and 400 <= error.status < 500
            try:
                if not is_refused:
                    await self._client.resume()
            except ClientError as resume_error:
                raise SyncError(
                    f"Generation can't be paused ({error}), nor resumed: {resume_error}", paused=True
                ) from resume_error
            raise SyncError(f"Generation can't be paused: {error}", paused=False) from error

    async def finish_update(self, version: int) -> None:
        """All engines have the weights of `version`: labels them so, and resumes."""
        await self.label(version)
        await self.resume()

    async def label(self, version: int, urls: Sequence[str] = ()) -> None:
        """From now on what these engines sample is of `version`; without any, what all of the run's do."""
        for url in urls or (None,):
            announce = partial(self._client.set_policy, version, url)
            await self._call_service(announce, f"{url or 'The run'} has version {version}, which can't be announced")

    async def resume(self) -> None:
        await self._call_service(self._client.resume, "Generation can't be resumed")

    async def probe(self, score: Scorer, vocab_size: int, engine: EngineSettings, *dtypes: str) -> Difference:
        """Samples a little at each engine and compares with `score`. Raises WeightMismatchError. `engine` has their
        kind and model; `dtypes` are those that the engine and the trainer compute in."""
        urls = await self.list_urls()
        if not urls:
            raise ConfigError("The run has no engines to probe: attach the trainer's engines first.")
        probe = Probe(score, vocab_size, choose_tolerance(*dtypes))
        differences = []
        for url in urls:
            probed_engine: Engine = load("engines", engine.kind)(url, engine)
            try:
                differences.append(await probe.check(url, await probe.sample(probed_engine)))
            finally:
                await probed_engine.close()
        return Difference.combine(differences)

    async def retry_while_away(self, step: Callable[[], Awaitable[T]]) -> T:
        """Repeats a step while an engine is away: it may be on its way up."""
        deadline = time.monotonic() + self._patience
        for delay in backoff.backoff_delays(_FIRST_RETRY_SECONDS, _MAX_RETRY_SECONDS):
            try:
                return await step()
            except (EngineError, ClientError) as error:
                if not _is_away(error) or time.monotonic() + delay > deadline:
                    raise
            await asyncio.sleep(delay)
        raise AssertionError  # there is always another delay

    async def _call_service(self, step: Callable[[], Awaitable[object]], failure_message: str) -> None:
        try:
            await self.retry_while_away(step)
        except ClientError as error:
            raise SyncError(f"{failure_message}: {error}", paused=True) from error


class SyncReport(Struct):
    """An update, of all replicas together."""

    version: int
    replicas: int
    difference: Difference  # between engine and trainer
    previous_difference: Difference | None = None  # between the weights that the engines had before and the trainer
    is_conclusive: bool = False  # the weights from before would not have passed
    seconds: dict[str, float] = field(default_factory=dict)  # by step
    paused_seconds: float = 0.0  # seconds without generation
    lost_replicas: list[str] = field(default_factory=list)  # that had other weights by then than they were given last


class WeightSender:
    """Sends weights to the engines of the client's run through a transport. One update at a time."""

    def __init__(
        self,
        client: AsyncClient,
        transport: WeightTransport,
        engine: EngineSettings,
        probe: Probe,
        *,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        """`engine` has their kind, model and key; `patience` is how many seconds one that is away is waited for."""
        self._client = client
        self._updater = WeightUpdater(client, patience=patience)
        self._transport = transport
        self._settings = engine
        self._probe = probe
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

    async def send(self, weights: "Mapping[str, Tensor]", version: int) -> SyncReport:
        """Raises SyncError. It may be called again then: with the same version, or after ProbeFailedError a larger
        one."""
        seconds: dict[str, float] = {}
        replicas = await self._list_replicas()
        lost = await self._find_lost_replicas(replicas)
        with _measure_step(seconds, "prepare"):
            await asyncio.to_thread(self._transport.prepare, weights, version)
        paused_at = time.monotonic()
        with _measure_step(seconds, "freeze"):
            await self._updater.freeze(is_frozen=partial(_are_paused, replicas))
        with _measure_step(seconds, "load"):
            await self._load(replicas, version)
        with _measure_step(seconds, "policy"):  # by name: one that has come meanwhile has other weights
            await self._updater.label(version, [replica.url for replica in replicas])
        with _measure_step(seconds, "resume"):
            await self._updater.resume()
        paused_seconds = time.monotonic() - paused_at
        self._transport.release_previous(version)
        report = await self._probe_replicas(replicas, version, seconds, stop=True)
        report.paused_seconds, report.lost_replicas = paused_seconds, lost
        return report

    async def _list_replicas(self) -> list["_Replica"]:
        urls = await self._updater.list_urls()
        for removed_url in self._replicas.keys() - urls:
            await self._replicas.pop(removed_url).close()
        for url in urls:
            if url not in self._replicas:
                self._replicas[url] = _Replica(url, self._settings)
        if not urls:
            raise SyncError(f"The run {self._client.run} has no engines: POST /engines gives it some.", paused=False)
        return [self._replicas[url] for url in urls]

    async def _find_lost_replicas(self, replicas: list["_Replica"]) -> list[str]:
        """Those that say that they have something else than they were given last: started again meanwhile, most likely.
        One that can't be asked is left to the steps that need it."""
        loaded_replicas = [replica for replica in replicas if replica.loaded_version is not None]
        answers = await asyncio.gather(
            *(self._transport.read_version(replica.http) for replica in loaded_replicas), return_exceptions=True
        )
        lost = []
        for replica, held_version in zip(loaded_replicas, answers, strict=True):
            if isinstance(held_version, BaseException):
                if not isinstance(held_version, EngineError):
                    raise held_version
            elif held_version != replica.loaded_version:
                lost.append(replica.url)
                log.warning(
                    "%s was given version %s and says that it has %s: it has lost its weights, and what it has sampled "
                    "since then may be labelled wrongly",
                    replica.url,
                    replica.loaded_version,
                    "none of ours" if held_version is None else f"version {held_version}",
                )
        return lost

    async def _load(self, replicas: list["_Replica"], version: int) -> None:
        results = await asyncio.gather(
            *(self._updater.retry_while_away(partial(self._load_replica, replica, version)) for replica in replicas),
            return_exceptions=True,
        )
        for replica, result in zip(replicas, results, strict=True):
            if isinstance(result, EngineError):
                message = f"{replica.url} did not take the weights of version {version}: {result}"
                raise SyncError(message, paused=True) from result
            if result is not None:
                raise result

    async def _load_replica(self, replica: "_Replica", version: int) -> None:
        await self._transport.load(replica.http, version)
        held_version = await self._transport.read_version(replica.http)
        if held_version != version:
            raise EngineError(f"It says that it has version {held_version}.")
        replica.loaded_version = version

    async def _probe_replicas(
        self, replicas: list["_Replica"], version: int, seconds: dict[str, float], *, stop: bool
    ) -> SyncReport:
        """With `stop`, generation stands still where an engine fails: nothing more is sampled with unknown weights."""
        with _measure_step(seconds, "probe"):
            previous_samples = [sample for replica in replicas for sample in replica.samples]
            previous_difference = await self._probe.measure_difference(previous_samples) if previous_samples else None
            try:
                difference = await self._compare_replicas(replicas)
            except (EngineError, WeightMismatchError) as error:
                pause_failure = await self._try_pause() if stop else None
                paused = stop and pause_failure is None
                if isinstance(error, WeightMismatchError):
                    message = f"Version {version}: {error}"
                    raise ProbeFailedError(message, version, paused=paused, pause_failure=pause_failure) from error
                message = f"Nobody knows which weights the engines have: {error}"
                raise SyncError(message, paused=paused, pause_failure=pause_failure) from error
        is_conclusive = previous_difference is not None and not previous_difference.is_within(self._probe.tolerance)
        return SyncReport(version, len(replicas), difference, previous_difference, is_conclusive, seconds)

    async def _compare_replicas(self, replicas: list["_Replica"]) -> Difference:
        sampling = [self._updater.retry_while_away(partial(self._probe.sample, replica.engine)) for replica in replicas]
        samples = await asyncio.gather(*sampling, return_exceptions=True)
        differences = []
        for replica, sample in zip(replicas, samples, strict=True):
            if isinstance(sample, BaseException):
                raise sample
            replica.samples = sample
            differences.append(await self._probe.check(replica.url, sample))
        return Difference.combine(differences)

    async def _try_pause(self) -> str | None:
        """Stops generation. Where that fails: why."""
        try:
            await self._client.pause()
        except ClientError as error:
            return str(error)
        return None


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


async def _are_paused(replicas: Sequence[_Replica]) -> bool:
    return all([await replica.is_paused() for replica in replicas])


def _is_away(error: EngineError | ClientError) -> bool:
    if isinstance(error, ClientError):
        return error.status in _UNAVAILABLE_STATUSES
    return error.kind == "overloaded" or isinstance(error.__cause__, aiohttp.ClientError | TimeoutError | OSError)


@contextmanager
def _measure_step(seconds: dict[str, float], step: str) -> Iterator[None]:
    started_at = time.monotonic()
    yield
    seconds[step] = time.monotonic() - started_at
