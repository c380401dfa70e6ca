"""Models are loaded once for all that is rendered with them, and apart where anything of it differs."""

import asyncio

import pytest

from polar.engines.scripted import TOKENIZER_FOLDER
from polar.errors import ConfigError
from polar.rendering.model_registry import ModelRegistry


async def test_a_model_is_loaded_once() -> None:
    registry, folder = ModelRegistry(), str(TOKENIZER_FOLDER)
    assert registry.get(folder, "auto", {}) is None
    first, second = await asyncio.gather(*(registry.load(folder, "auto", {}) for _ in range(2)))
    assert first is second is registry.get(folder, "auto", {})
    other = await registry.load(folder, "auto", {"enable_thinking": False})
    assert other is not first
    assert other.codec.tokenizer is first.codec.tokenizer  # what both have is there once
    assert registry.worker_pools == [first.workers, other.workers]
    await registry.close()


async def test_a_folder_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        await ModelRegistry().load("nowhere", "auto", {})
