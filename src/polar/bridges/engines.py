"""The trainer's engines, as Polar has to know them: where they are, which weights they have, when they stand still.

Whoever owns an engine loads its weights. So Polar is told before and after:

    async with engines.updating(version):   # generation stands still, calls that run wait
        trainer_loads_weights()
    await engines.probe(score, ...)         # what the engines sample is what the trainer computes
"""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from polar.client.async_client import AsyncClient
from polar.config import EngineSettings
from polar.engines.base import Engine, normalize_engine_url
from polar.errors import ConfigError, PolarError
from polar.plugins import load
from polar.records.result import PauseMode
from polar.train.weight_sync.probe import Difference, Probe, Scorer, choose_tolerance


class WeightMismatchError(PolarError):
    """An engine samples with other weights than the trainer's."""


class TrainerEngines:
    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def attach(self, urls: Iterable[str], version: int) -> None:
        """These are the run's engines from now on, and no others; all have the weights of `version`. Generation goes
        on, as `begin` has it."""
        wanted = dict.fromkeys(map(normalize_engine_url, urls))
        if not wanted:
            raise ConfigError("The trainer has no engines to attach: start them first, or name their addresses.")
        for url in wanted:  # with its first one the run has engines of its own
            await self._client.add_engine(url, version)
        for replica in (await self._client.engines())["replicas"]:
            if normalize_engine_url(replica["url"]) not in wanted:
                await self._client.remove_engine(replica["url"])
        await self._client.set_policy(version)
        await self.resume_if_paused()

    async def resume_if_paused(self) -> None:
        """For a trainer that starts: where an earlier one did not live to end an update, generation stands still."""
        if (await self._client.policy())["paused"]:
            await self._client.resume()

    @asynccontextmanager
    async def updating(self, version: int, mode: PauseMode = "freeze") -> AsyncIterator[None]:
        """Generation stands still within. Where it fails, generation stays as it is: nobody knows the weights then. The
        next update sets it going, or `begin`."""
        await self.begin_update(mode)
        yield
        await self.finish_update(version)

    async def begin_update(self, mode: PauseMode = "freeze") -> None:
        """The first half of `updating`, for trainers that load weights between two calls of ours."""
        await self._client.pause(mode)

    async def finish_update(self, version: int) -> None:
        """The second half: all engines have the weights of `version`."""
        await self._client.set_policy(version)
        await self._client.resume()

    async def probe(self, score: Scorer, vocab_size: int, engine: EngineSettings, *dtypes: str) -> Difference:
        """Samples a little at each engine and compares with `score`. Raises WeightMismatchError. `engine` has their
        kind and model; `dtypes` are those that the engine and the trainer compute in."""
        replicas = (await self._client.engines())["replicas"]
        if not replicas:
            raise ConfigError("The run has no engines to probe: attach the trainer's engines first.")
        probe = Probe(score, vocab_size, choose_tolerance(*dtypes))
        found = []
        for replica in replicas:
            url = str(replica["url"])
            one: Engine = load("engines", engine.kind)(url, engine)
            try:
                difference = await probe.measure_difference(await probe.sample(one))
            finally:
                await one.close()
            if not difference.is_within(probe.tolerance):
                raise WeightMismatchError(
                    f"{url} does not have the trainer's weights: log-probabilities differ by {difference.largest:.3g} "
                    f"at most and {difference.mean:.3g} in the mean; {probe.tolerance.largest:g} and "
                    f"{probe.tolerance.mean:g} are allowed."
                )
            found.append(difference)
        return Difference.combine(found)
