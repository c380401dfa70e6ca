"""The models that prompts are made for, each loaded once, with the processes that make its long prompts."""

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from polar.rendering.continuation import ContinuationMode
from polar.rendering.encoder import SPELLING_BREAK
from polar.rendering.model_codec import ModelCodec, resolve_model_folder
from polar.rendering.worker import WorkerSetup
from polar.rendering.worker_pool import WorkerPool


class LoadedModel(Struct, frozen=True):
    codec: ModelCodec
    workers: WorkerPool


class ModelRegistry:
    def __init__(self) -> None:
        self._models: dict[tuple[str, ContinuationMode, bytes], LoadedModel] = {}

    def get(self, folder: str, mode: ContinuationMode, template_kwargs: Mapping[str, Any]) -> LoadedModel | None:
        """None where it was not loaded yet."""
        return self._models.get(_make_key(folder, mode, template_kwargs))

    async def load(self, folder: str, mode: ContinuationMode, template_kwargs: dict[str, Any]) -> LoadedModel:
        """Raises ConfigError where there is no such folder."""
        key = _make_key(folder, mode, template_kwargs)
        if key not in self._models:
            path = await asyncio.to_thread(resolve_model_folder, folder)
            codec = await asyncio.to_thread(ModelCodec.load, path, mode, template_kwargs)
            if key not in self._models:  # still: another call may have been faster
                workers = WorkerPool(WorkerSetup(str(path), mode, template_kwargs, SPELLING_BREAK))
                self._models[key] = LoadedModel(codec, workers)
        return self._models[key]

    @property
    def worker_pools(self) -> list[WorkerPool]:
        return [model.workers for model in self._models.values()]

    async def close(self) -> None:
        await asyncio.gather(*(workers.close() for workers in self.worker_pools))


def _make_key(
    folder: str, mode: ContinuationMode, template_kwargs: Mapping[str, Any]
) -> tuple[str, ContinuationMode, bytes]:
    return folder, mode, msgspec.json.encode(template_kwargs, order="deterministic")
