"""The steps of an update of the engines' weights, for every trainer.

    prepare ─► freeze ─► every replica loads ─► label (POST /policy) ─► resume ─► probe

A trainer that owns its engines loads the weights itself between `freeze` and `label` (`WeightUpdater`). A trainer that
has the weights in its own process leaves loading to a transport (`WeightSender`).

If an update fails before the first replica starts to load, generation continues unchanged. After that, weights and
labels may disagree, so a failure leaves generation paused. The service keeps the pause through restarts, and the next
update ends it. An unavailable engine is waited for."""

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
from polar.records.policy import PauseMode
from polar.weight_sync.base import ProbeFailedError, SyncError, WeightMismatchError, WeightTransport
from polar.weight_sync.probe import Difference, Probe, ProbeSample, Scorer, choose_tolerance

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

T = TypeVar("T")
_FIRST_RETRY_SECONDS, _MAX_RETRY_SECONDS = 0.2, 5.0
"""Delays between attempts to reach an unavailable engine."""
_UNAVAILABLE_STATUSES = (502, 504)
"""The service's status when engines or nodes do not respond to an order, or not yet."""
PATIENCE_SECONDS = 300.0
"""The default time to wait for an unavailable engine."""


class WeightUpdater:
    """Updates the engines of the client's run. One update at a time.

    async with updater.updating(version):   # generation is paused, running calls wait
        trainer_loads_weights()
    await updater.probe(score, ...)         # engines and trainer compute the same log-probabilities
    """

    def __init__(self, client: AsyncClient, *, patience: float = PATIENCE_SECONDS) -> None:
        self._client = client
        self._patience = patience

    async def attach(self, urls: Iterable[str], version: int) -> None:
        """Makes these the run's only engines, all with the weights of `version`, and resumes generation if it is
        paused."""
        attached_urls = dict.fromkeys(map(normalize_engine_url, urls))
        if not attached_urls:
            raise ConfigError("The trainer has no engines to attach: start them first, or name their addresses.")
        for url in attached_urls:  # the first one gives the run its own engines
            await self._client.add_engine(url, version)
        for url in await self.list_urls():
            if normalize_engine_url(url) not in attached_urls:
                await self._client.remove_engine(url)
        await self._client.set_policy(version)
        await self.resume_if_paused()

    async def list_urls(self) -> list[str]:
        """The addresses of the run's engines at the service."""
        return [str(replica["url"]) for replica in (await self._client.engines())["replicas"]]

    async def resume_if_paused(self) -> None:
        """For a starting trainer: an earlier one may have died during an update and left generation paused."""
        if (await self._client.policy())["paused"]:
            await self._client.resume()

    # An update, step by step

    @asynccontextmanager
    async def updating(self, version: int, mode: PauseMode = "freeze") -> AsyncIterator[None]:
        """Pauses generation while the trainer loads the weights of `version`. If that fails, generation stays paused,
        because the weights are unknown. The next update resumes it, or `resume_if_paused`."""
        await self.freeze(mode)
        yield
        await self.finish_update(version)

    async def freeze(
        self, mode: PauseMode = "freeze", *, is_frozen: Callable[[], Awaitable[bool]] | None = None
    ) -> None:
        """Pauses generation: running calls are frozen or, with `drain`, waited for. If `is_frozen` reports that engines
        can't freeze, their calls are waited for as well. Raises SyncError; generation then continues."""
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
        """Labels all engines with `version`, whose weights they have, and resumes generation."""
        await self.label(version)
        await self.resume()

    async def label(self, version: int, urls: Sequence[str] = ()) -> None:
        """Labels what these engines sample from now on with `version`. Without `urls`, all engines of the run."""
        for url in urls or (None,):
            announce = partial(self._client.set_policy, version, url)
            await self._call_service(announce, f"{url or 'The run'} has version {version}, which can't be announced")

    async def resume(self) -> None:
        await self._call_service(self._client.resume, "Generation can't be resumed")

    async def probe(self, score: Scorer, vocab_size: int, engine: EngineSettings, *dtypes: str) -> Difference:
        """Samples a few tokens at each engine and compares their log-probabilities with `score`. `engine` has their
        kind and model; `dtypes` are those that engine and trainer compute in. Raises WeightMismatchError."""
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
        """Repeats a step while an engine is unavailable, since it may be starting."""
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
    """The outcome of an update of all replicas."""

    version: int
    replicas: int
    difference: Difference  # between engine and trainer
    previous_difference: Difference | None = None  # between the engines' earlier weights and the trainer
    is_conclusive: bool = False  # the earlier weights would have failed the probe
    seconds: dict[str, float] = field(default_factory=dict)  # by step
    paused_seconds: float = 0.0  # seconds without generation
    lost_replicas: list[str] = field(default_factory=list)  # that no longer had the weights that they were given last


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
        """`engine` has their kind, model and key. `patience` is how many seconds to wait for an unavailable engine."""
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
        """Checks without an update that the engines have the trainer's weights. Raises SyncError."""
        if (await self._client.policy())["paused"]:
            raise SyncError("The engines can't be probed: an update of their weights did not end.", paused=True)
        return await self._probe_replicas(await self._list_replicas(), version, {}, stop=False)

    async def send(self, weights: "Mapping[str, Tensor]", version: int) -> SyncReport:
        """Updates all replicas. Raises SyncError; it may then be called again with the same version or, after
        ProbeFailedError, with a larger one."""
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
        with _measure_step(seconds, "policy"):  # by address: a replica that was added meanwhile has other weights
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
        """Replicas that report another version than they were given last; most likely they restarted. One that can't be
        reached is left to the later steps."""
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
                    "%s was given version %s and says that it has %s: it lost its weights, and what it sampled since "
                    "then may be labelled wrongly",
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
        """Probes all replicas. With `stop`, generation is paused if one fails, so that nothing is sampled with unknown
        weights."""
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
                message = f"The engines' weights are unknown: {error}"
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
        """Pauses generation. Returns the error if that fails."""
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
        self.loaded_version: int | None = None  # of the weights that it loaded last

    async def is_paused(self) -> bool:
        """An unavailable engine has no running calls. vLLM reports a frozen engine as asleep."""
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
