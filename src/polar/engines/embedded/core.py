"""The engine without its server: generations, the model that samples them, and its weights.

New weights cut every generation where it stands: it goes on as a new request of the model's, behind its prompt and the
tokens it has, so that all its keys and values are computed anew.
"""

import asyncio
import logging
from pathlib import Path
from typing import Any

import torch

from polar.engines.embedded import weights
from polar.engines.embedded.batching import Batching
from polar.engines.embedded.choosing import Row
from polar.engines.embedded.generation import Asked, Generation, Token
from polar.engines.embedded.options import Options
from polar.engines.embedded.slots import Slots
from polar.errors import ConfigError
from polar.rendering.tokenizer import Tokenizer

_CONTEXT = 2048  # tokens, where neither the model nor the options say otherwise

log = logging.getLogger(__name__)


class Core:
    """Used on the event loop that it was started on."""

    def __init__(self, model: Any, tokenizer: Tokenizer, options: Options) -> None:
        self.tokenizer = tokenizer
        self.paused = False
        self.broken = asyncio.Event()  # the model can't be used any more: only a new process can help
        self._model = model
        self._options = options
        self._ends = _ends(model, tokenizer)
        longest = getattr(model.config.get_text_config(), "max_position_embeddings", _CONTEXT)
        self.context_length: int = min(options.context_length or _CONTEXT, longest)
        count = min(weights.cache_tokens(model, options) // self.context_length, options.max_requests)
        if not count:
            raise ConfigError(
                f"There is no room for the keys and values of {self.context_length} tokens: set a larger memory_gib, "
                "or a smaller context_length."
            )
        self._running: dict[str, Generation] = {}  # by the name that the model's requests have
        self._rows: dict[Generation, Row] = {}
        self._changing = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._batching = Batching(model, Slots(count, self.context_length), options, self._deliver, self._fail)

    @property
    def version(self) -> int:
        return self._batching.version

    @property
    def computed(self) -> int:
        """How many tokens went through the model so far."""
        return self._batching.computed

    @property
    def running(self) -> int:
        return len(self._running)

    async def stop(self) -> None:
        for generation in self._running.values():
            generation.abort()
        self._running.clear()
        await asyncio.to_thread(self._batching.stop)

    # Generations

    def begin(self, asked: Asked) -> Generation:
        generation = Generation(asked, self._ends, self.tokenizer)
        random = None
        if asked.choosing.seed is not None:
            random = torch.Generator().manual_seed(asked.choosing.seed)
        self._submit(generation, Row(asked.choosing, random))
        return generation

    def end(self, generation: Generation) -> None:
        """Nobody waits for more of it."""
        for name, other in list(self._running.items()):
            if other is generation:
                del self._running[name], self._rows[generation]
                self._batching.drop(name)
        generation.abort()

    def _submit(self, generation: Generation, row: Row) -> None:
        ends = self._ends.union(generation.asked.stop_ids)
        name = self._batching.add(generation.context, generation.left, ends, row)
        self._running[name], self._rows[generation] = generation, row

    def _deliver(self, tokens: list[tuple[str, Token]]) -> None:
        self._loop.call_soon_threadsafe(self._take, tokens)

    def _take(self, tokens: list[tuple[str, Token]]) -> None:
        for name, token in tokens:
            generation = self._running.get(name)
            if generation is not None:
                generation.take(token)
                if generation.done:
                    self.end(generation)

    def _fail(self, why: str) -> None:
        self._loop.call_soon_threadsafe(self._failed, why)

    def _failed(self, why: str) -> None:
        for generation in self._running.values():
            generation.fail(f"The model broke: {why}")
        self._running.clear()
        self._rows.clear()
        self.broken.set()

    # Policy

    async def pause(self) -> None:
        """When this returns, no token is sampled any more."""
        async with self._changing:
            self.paused = True
            await asyncio.to_thread(self._batching.pause)

    async def resume(self) -> None:
        async with self._changing:
            self.paused = False
            await asyncio.to_thread(self._batching.resume)

    def abort_all(self) -> None:
        for generation in list(self._running.values()):
            self.end(generation)

    async def update(self, update: weights.Update) -> None:
        """Tokens that are sampled after this come from the new weights, and so does all that they look back on.
        Raises ConfigError where they don't fit: then all is as before."""
        async with self._changing:
            await asyncio.to_thread(self._replace, update)
            # Tokens of the old weights were handed over before they were replaced: they have come.
            cut, self._running = self._running, {}
            for name, generation in cut.items():
                self._batching.drop(name)
                self._submit(generation, self._rows.pop(generation))
            if self._options.state is not None:
                await asyncio.to_thread(weights.remember, Path(self._options.state), update)

    def _replace(self, update: weights.Update) -> None:
        new = weights.NewWeights(self._model, Path(update.path))
        with self._batching.standing_still():
            self._batching.forget()
            try:
                new.copy()
            except BaseException:
                self._loop.call_soon_threadsafe(self.broken.set)
                raise
            self._batching.version = update.version

    async def restore(self) -> None:
        """The weights of the last update that this engine, or the one before it, was given; if they are still there."""
        last = weights.remembered(Path(self._options.state)) if self._options.state is not None else None
        if last is None:
            return
        try:
            await self.update(last)
        except ConfigError as error:
            log.warning("Begins with version 0, and not with version %d: %s", last.version, error)


def _ends(model: Any, tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens with which the model ends its turn, by its generation config, and by its tokenizer."""
    told = getattr(model.generation_config, "eos_token_id", None)
    ends = set(told if isinstance(told, list) else [] if told is None else [told])
    if tokenizer.eos_id is not None:
        ends.add(tokenizer.eos_id)
    return frozenset(ends)
