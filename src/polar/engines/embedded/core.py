"""The engine behind its server: generations, the model that samples them, and its weights.

New weights cut every generation where it stands: it goes on as a new request of the model's, behind its prompt and the
tokens it has, so that all its keys and values are computed anew.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from polar.engines.api_server import wire
from polar.engines.api_server.backend import GenerationRequest, RequestError, SampledToken
from polar.engines.api_server.request_reader import refuse_unsupported
from polar.engines.embedded import weights
from polar.engines.embedded.batcher import Batcher
from polar.engines.embedded.generation import Generation
from polar.engines.embedded.kv_cache import KVCache
from polar.engines.embedded.options import EmbeddedOptions
from polar.engines.embedded.sampler import SamplingState
from polar.errors import ConfigError
from polar.rendering.tokenizer import Tokenizer

_DEFAULT_CONTEXT_TOKENS = 2048  # tokens, where neither the model nor the options say otherwise

_MAX_ALTERNATIVES = 20

# Parameters that are not supported, and the values with which they change nothing. What would change the sampling is
# refused, never left out.
_NEUTRAL_SAMPLING: dict[str, tuple[object, ...]] = {
    "n": (None, 1),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_tokens": (None, 0),
    "logit_bias": (None, {}),
    "ignore_eos": (None, False),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "prompt_logprobs": (None,),
    "structured_outputs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "response_format": (None, {"type": "text"}),
    "use_beam_search": (None, False),
    "best_of": (None, 1),
    "logits_processors": (None, []),
    "truncate_prompt_tokens": (None,),
}
_NEUTRAL_COMPLETION: dict[str, tuple[object, ...]] = {
    "echo": (None, False),
    "suffix": (None, ""),
    "prompt_embeds": (None,),
}
_NEUTRAL_CHAT: dict[str, tuple[object, ...]] = {
    "tool_choice": (None, "auto", "none"),
    "chat_template": (None,),
    "continue_final_message": (None, False),
    "documents": (None, []),
    "add_special_tokens": (None, False),
}

log = logging.getLogger(__name__)


class EngineCore:
    """A `SamplingBackend`. Used on the event loop that it was started on."""

    name = "embedded"
    ignores_media = False
    labels_every_chunk = True
    pause_modes: Sequence[str] = ("keep", "abort")

    def __init__(self, model: Any, tokenizer: Tokenizer, options: EmbeddedOptions) -> None:
        self.tokenizer = tokenizer
        self.vocabulary_size: int = model.get_input_embeddings().num_embeddings
        self.paused = False
        self.model_failed = asyncio.Event()  # the model can't be used any more: only a new process can help
        self._model = model
        self._options = options
        self._end_ids = _find_end_ids(model, tokenizer)
        longest = getattr(model.config.get_text_config(), "max_position_embeddings", _DEFAULT_CONTEXT_TOKENS)
        self.context_length: int = min(options.context_length or _DEFAULT_CONTEXT_TOKENS, longest)
        count = min(weights.count_cache_tokens(model, options) // self.context_length, options.max_requests)
        if not count:
            raise ConfigError(
                f"There is no room for the keys and values of {self.context_length} tokens: set a larger memory_gib, "
                "or a smaller context_length."
            )
        self._running: dict[str, Generation] = {}  # by the name that the model's requests have
        self._sampling_states: dict[Generation, SamplingState] = {}
        self._change_lock = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._batcher = Batcher(
            model, KVCache(count, self.context_length), options, self._hand_over_tokens, self._report_failure
        )

    @property
    def version(self) -> int:
        return self._batcher.version

    @property
    def computed_tokens(self) -> int:
        """How many tokens went through the model so far."""
        return self._batcher.computed_tokens

    @property
    def counters(self) -> Mapping[str, int]:
        return {"polar:computed_tokens_total": self.computed_tokens}

    @property
    def running_count(self) -> int:
        return len(self._running)

    @property
    def failed(self) -> bool:
        return self.model_failed.is_set()

    async def stop(self) -> None:
        for generation in self._running.values():
            generation.abort()
        self._running.clear()
        await asyncio.to_thread(self._batcher.stop)

    # Generations

    def check(self, asked: wire.SamplingFields) -> None:
        refuse_unsupported(asked, _NEUTRAL_SAMPLING, self.name)
        alternatives = None
        if isinstance(asked, wire.ChatRequest):
            refuse_unsupported(asked, _NEUTRAL_CHAT, self.name)
            alternatives = asked.top_logprobs
        elif isinstance(asked, wire.CompletionRequest):
            refuse_unsupported(asked, _NEUTRAL_COMPLETION, self.name)
            alternatives = asked.logprobs
        elif isinstance(asked, wire.GenerateParameters):
            alternatives = asked.logprobs
        if asked.temperature is not None and not 0 <= asked.temperature <= 100:
            raise RequestError(f"temperature must be between 0 and 100, got {asked.temperature}.", "temperature")
        if asked.top_p is not None and not 0 < asked.top_p <= 1:
            raise RequestError(f"top_p must be above 0 and at most 1, got {asked.top_p}.", "top_p")
        if asked.min_p is not None and not 0 <= asked.min_p <= 1:
            raise RequestError(f"min_p must be between 0 and 1, got {asked.min_p}.", "min_p")
        if alternatives is not None and not 0 <= alternatives <= _MAX_ALTERNATIVES:
            raise RequestError(f"At most {_MAX_ALTERNATIVES} alternatives are reported for a token.", "logprobs")

    def make_generation(self, request: GenerationRequest) -> Generation:
        return Generation(request, self._end_ids, self.tokenizer)

    def start_generation(self, generation: Generation) -> None:
        sampling, random = generation.request.sampling, None
        if sampling.seed is not None:
            random = torch.Generator().manual_seed(sampling.seed)
        self._submit(generation, SamplingState(sampling, random))

    def end_generation(self, generation: Generation) -> None:
        for name, other in list(self._running.items()):
            if other is generation:
                del self._running[name], self._sampling_states[generation]
                self._batcher.drop(name)
        generation.abort()

    def _submit(self, generation: Generation, sampling_state: SamplingState) -> None:
        ends = self._end_ids.union(generation.request.stop_token_ids)
        name = self._batcher.add(generation.context, generation.remaining_tokens, ends, sampling_state)
        self._running[name], self._sampling_states[generation] = generation, sampling_state

    def _hand_over_tokens(self, tokens: list[tuple[str, SampledToken]]) -> None:
        self._loop.call_soon_threadsafe(self._dispatch_tokens, tokens)

    def _dispatch_tokens(self, tokens: list[tuple[str, SampledToken]]) -> None:
        for name, token in tokens:
            generation = self._running.get(name)
            if generation is not None:
                generation.add_token(token)
                if generation.done:
                    self.end_generation(generation)

    def _report_failure(self, why: str) -> None:
        self._loop.call_soon_threadsafe(self._fail_all, why)

    def _fail_all(self, why: str) -> None:
        for generation in self._running.values():
            generation.fail(f"The model broke: {why}")
        self._running.clear()
        self._sampling_states.clear()
        self.model_failed.set()

    # Policy

    async def pause(self, mode: str = "keep") -> None:
        """When this returns, no token is sampled any more."""
        async with self._change_lock:
            self.paused = True
            await asyncio.to_thread(self._batcher.pause)
        if mode == "abort":
            for generation in list(self._running.values()):
                self.end_generation(generation)

    async def resume(self) -> None:
        async with self._change_lock:
            self.paused = False
            await asyncio.to_thread(self._batcher.resume)

    async def update_weights(self, update: weights.WeightUpdate) -> None:
        """Tokens that are sampled after this come from the new weights, and so does all that they look back on.
        Raises ConfigError where they don't fit: then all is as before."""
        async with self._change_lock:
            await asyncio.to_thread(self._replace_weights, update)
            # Tokens of the old weights were handed over before they were replaced: they have come.
            cut, self._running = self._running, {}
            for name, generation in cut.items():
                self._batcher.drop(name)
                self._submit(generation, self._sampling_states.pop(generation))
            if self._options.state is not None:
                await asyncio.to_thread(weights.save_update, Path(self._options.state), update)

    def _replace_weights(self, update: weights.WeightUpdate) -> None:
        new = weights.NewWeights(self._model, Path(update.path))
        with self._batcher.hold_still():
            self._batcher.clear()
            try:
                new.copy_into_model()
            except BaseException:
                self._loop.call_soon_threadsafe(self.model_failed.set)
                raise
            self._batcher.version = update.version

    async def restore_weights(self) -> None:
        """The weights of the last update that this engine, or the one before it, was given; if they are still there."""
        last = weights.load_update(Path(self._options.state)) if self._options.state is not None else None
        if last is None:
            return
        try:
            await self.update_weights(last)
        except ConfigError as error:
            log.warning("Begins with version 0, and not with version %d: %s", last.version, error)


def _find_end_ids(model: Any, tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens with which the model ends its turn, by its generation config, and by its tokenizer."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    ends = set(configured if isinstance(configured, list) else [] if configured is None else [configured])
    if tokenizer.eos_id is not None:
        ends.add(tokenizer.eos_id)
    return frozenset(ends)
