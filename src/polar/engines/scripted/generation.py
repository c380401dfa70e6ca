"""A generation, sampled token by token under whatever policy is loaded.

What is said never depends on the policy version (script.py); the log-probabilities do. So a weight update in the middle
of a generation changes the numbers from that token on, and the spans say where.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from math import nan

import numpy as np

from polar.engines.api_server.backend import (
    BrokenReplyError,
    FinishReason,
    GenerationRequest,
    SampledToken,
    extend_spans,
)
from polar.engines.api_server.output_parser import OutputParser
from polar.engines.scripted.play import Fault
from polar.engines.scripted.sampler import advance, change_version, logprob, rank_alternatives, route_experts
from polar.engines.scripted.script import BLOCK_TOKENS, Script
from polar.errors import EngineError
from polar.records.exchange import VersionSpan
from polar.records.experts import to_wire

_UNSTREAMED_STEP_TOKENS = 64  # tokens at a time where nobody looks in between
_GARBAGE = b'data: {"id": "chatcmpl-garb\xff\x00age", "choices": [{\n\n'


class ScriptedPolicy:
    """The weights that all generations share: their version, and whether anything may be sampled at all."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.aborts = 0  # how often all running generations were told to end
        self._admission_open = asyncio.Event()
        self._sampling_open = asyncio.Event()
        self._idle = asyncio.Event()
        self._running = 0
        self._idle.set()
        self.resume()

    @property
    def paused(self) -> bool:
        return not self._admission_open.is_set()

    async def pause(self, mode: str) -> None:
        """New generations wait. Running ones stand still (`keep`), end now (`abort`), or are waited for (`wait`)."""
        self._admission_open.clear()
        if mode == "keep":
            self._sampling_open.clear()
        elif mode == "abort":
            self.aborts += 1
        else:
            await self._idle.wait()

    def resume(self) -> None:
        self._admission_open.set()
        self._sampling_open.set()

    @asynccontextmanager
    async def admit(self) -> AsyncGenerator[None]:
        await self._admission_open.wait()
        self._running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def wait_while_paused(self) -> bool:
        """Waits while generation is paused; says whether it was."""
        if self._sampling_open.is_set():
            return False
        await self._sampling_open.wait()
        return True


class ScriptedGeneration:
    def __init__(
        self,
        request: GenerationRequest,
        script: Script,
        policy: ScriptedPolicy,
        *,
        interval: float,
        tokens_per_chunk: int,
        vocabulary_size: int,
        experts: int,
    ) -> None:
        """`interval`: seconds between tokens."""
        self.request = request
        self.script = script
        self.interval = interval
        self.fault: Fault | None = None
        self.tokens: list[SampledToken] = []
        self.spans: list[VersionSpan] = []
        self.finish_reason: FinishReason | None = None
        self.cached_tokens = 0
        self.output_parser = (
            None
            if request.chat is None
            else OutputParser(script.context.thinking == "begun", tools=bool(request.chat.callable_tools))
        )
        self._policy = policy
        self._tokens_per_chunk = tokens_per_chunk
        self._vocabulary_size = vocabulary_size
        self._experts = experts
        self._state = script.state  # of all tokens so far, under `_version`
        self._version = 0

    @property
    def stop_reason(self) -> int | str | None:
        return None if self.finish_reason == "abort" else self.script.stop_reason

    @property
    def reports_logprobs(self) -> bool:
        return self.request.wants_logprobs and self.script.turn.logprobs != "missing"

    @property
    def routed_experts(self) -> str | None:
        if not self._experts:
            return None
        ids = np.concatenate([self.request.prompt, self.script.ids[: len(self.tokens)]])
        return to_wire(route_experts(ids, self._experts))

    async def sample_steps(self) -> AsyncGenerator[list[SampledToken]]:
        """Raises EngineError or BrokenReplyError where the play wants this generation to go wrong."""
        loop = asyncio.get_running_loop()
        turn, total = self.script.turn, len(self.script.ids)
        fault_at = min(turn.fail_after, max(total - 1, 0)) if self.fault else None
        size = self._tokens_per_chunk
        if not self.request.stream:
            size = 1 if self.interval else _UNSTREAMED_STEP_TOKENS
        async with self._policy.admit():
            aborts = self._policy.aborts
            if turn.delay:
                await asyncio.sleep(turn.delay)
            due = loop.time()
            while True:
                if fault_at is not None and len(self.tokens) >= fault_at:
                    await self._raise_fault()
                if await self._policy.wait_while_paused():
                    due = loop.time()
                if self._policy.aborts != aborts:
                    self.finish_reason = "abort"
                    yield []
                    return
                stop = min(len(self.tokens) + size, total if fault_at is None else fault_at)
                new = self._sample(stop)
                if stop == total:
                    self.finish_reason = self.script.finish_reason
                    yield new
                    return
                yield new
                if turn.token_delay is not None:
                    due = max(due, loop.time())  # a delay is kept after a stall too; a rate catches up
                due += self.interval * size
                await asyncio.sleep(max(due - loop.time(), 0))

    async def _raise_fault(self) -> None:
        if self.fault == "hang":
            await asyncio.Event().wait()
        if self.fault == "midstream":
            raise EngineError("The play breaks off here.")
        raise BrokenReplyError(_GARBAGE if self.fault == "garbage" else None)

    def _sample(self, stop: int) -> list[SampledToken]:
        start, version = len(self.tokens), self._policy.version
        if version != self._version:
            length = len(self.request.prompt) + start
            self._state = change_version(self._state, length, self._version, version)
            self._version = version
        new = []
        for place in range(start, stop):
            id = self.script.ids[place]
            token = SampledToken(id, self._report_logprob(place, id), version, text=self.script.texts[place])
            if self.request.sampling.alternatives:
                token.alternatives = rank_alternatives(
                    self._state, id, self.request.sampling.alternatives, self._vocabulary_size
                )
            new.append(token)
            self._state = advance(self._state, id)
        self.tokens += new
        extend_spans(self.spans, version, start, stop)
        return new

    def _report_logprob(self, place: int, id: int) -> float | None:
        """As it is, or spoiled where the play says so."""
        spoiled, count = self.script.turn.logprobs, len(self.script.ids)
        if spoiled == "short" and place == count - 1:
            return None
        if place == count // 2 and spoiled in ("nan", "sentinel"):
            return nan if spoiled == "nan" else -9999.0
        return logprob(self._state, id)


class PrefixCache:
    """Which blocks of context were computed before: an estimate of what an engine's prefix cache would hold."""

    def __init__(self, capacity: int = 1 << 17) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._capacity = capacity

    def count_cached_tokens(self, script: Script, prompt_tokens: int) -> int:
        """Of the prompt's last token something must always be computed, so a whole prompt is never cached."""
        blocks = script.blocks[: (prompt_tokens - 1) // BLOCK_TOKENS]
        known = next((place for place, block in enumerate(blocks) if block not in self._blocks), len(blocks))
        return known * BLOCK_TOKENS

    def add(self, script: Script, prompt_tokens: int, sampled: int) -> None:
        """The prompt and the first `sampled` tokens of the output."""
        blocks = list(script.blocks)
        state = script.state
        for length, id in enumerate(script.ids[:sampled], prompt_tokens + 1):
            state = advance(state, id)
            if length % BLOCK_TOKENS == 0:
                blocks.append(state)
        for block in blocks:
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        self._blocks.clear()
