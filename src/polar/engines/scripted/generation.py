"""One generation: decided in full before its first token, then sampled token by token under whatever policy is loaded.

What is said never depends on the policy version; the log-probabilities do. So a weight update in the middle of a
generation changes the numbers from that token on, and the spans say where.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

from msgspec import Struct, field

from polar.engines.scripted.play import Fault, ScriptedTurn, TurnContext, render_output
from polar.engines.scripted.sampler import Sampler, advance, change_version, context_states, logprob
from polar.records.exchange import VersionSpan
from polar.rendering.tokenizer import TokenIds, Tokenizer, decode_pieces

BLOCK_TOKENS = 16


class Bounds(Struct):
    """What ends a generation besides the model's own end token."""

    max_tokens: int
    stop: Sequence[str] = ()
    stop_ids: Sequence[int] = ()
    show_stop: bool = False


class Script(Struct):
    """All that is settled before the first token."""

    prompt: TokenIds
    turn: ScriptedTurn
    context: TurnContext
    state: int  # of the prompt, under version 0
    blocks: list[int]  # the states at each full block of the prompt
    ids: list[int]
    texts: list[str]  # what each id adds to the visible output
    finish_reason: str
    stop_reason: int | str | None = None


def write_script(
    tokenizer: Tokenizer,
    sampler: Sampler,
    prompt: TokenIds,
    context: TurnContext,
    turn: ScriptedTurn,
    bounds: Bounds,
    seed: int,
) -> Script:
    states = context_states(0, prompt)
    state = int(states[-1])
    end = tokenizer.special_tokens.get("eos_token", "") if turn.finish_reason == "stop" else ""
    ids = sampler.sample(render_output(turn, context) + end, state, seed)
    script = Script(
        prompt,
        turn,
        context,
        state=state,
        blocks=states[BLOCK_TOKENS::BLOCK_TOKENS].tolist(),
        ids=ids,
        texts=decode_pieces(tokenizer, ids),
        finish_reason=turn.finish_reason,
    )
    _end_at_token(script, tokenizer.eos_id, bounds)
    _end_at_text(script, bounds)
    if len(script.ids) > bounds.max_tokens:
        del script.ids[bounds.max_tokens :], script.texts[bounds.max_tokens :]
        script.finish_reason, script.stop_reason = "length", None
    return script


def _end_at_token(script: Script, eos: int | None, bounds: Bounds) -> None:
    for place, id in enumerate(script.ids):
        if id == eos or id in bounds.stop_ids:
            del script.ids[place + 1 :], script.texts[place:]
            script.texts.append("")  # the token is reported, its text is not
            script.finish_reason, script.stop_reason = "stop", None if id == eos else id
            return


def _end_at_text(script: Script, bounds: Bounds) -> None:
    """The token that completes a stop string is the last one; the string itself isn't shown."""
    text = "".join(script.texts)
    found = [(at + len(stop), at, stop) for stop in bounds.stop if stop and (at := text.find(stop)) >= 0]
    if not found:
        return
    complete, at, stop = min(found)
    shown = complete if bounds.show_stop else at
    seen = 0
    for place, piece in enumerate(script.texts):
        script.texts[place] = piece[: max(shown - seen, 0)]
        seen += len(piece)
        if seen >= complete:
            del script.ids[place + 1 :], script.texts[place + 1 :]
            break
    script.finish_reason, script.stop_reason = "stop", stop


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
    async def admission(self) -> AsyncGenerator[None]:
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


class FaultError(Exception):
    """The play wants this generation to go wrong here."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault)
        self.fault = fault


class Step(Struct):
    """Tokens `start` to `stop` (exclusive) of the script were sampled."""

    start: int
    stop: int
    states: list[int]  # the context's state before each
    logprobs: list[float]
    is_last: bool


class Generation(Struct):
    script: Script
    policy: ScriptedPolicy
    interval: float  # seconds between tokens
    fault: Fault | None = None
    spans: list[VersionSpan] = field(default_factory=list)
    sampled: int = 0
    aborted: bool = False
    _state: int = 0  # of all tokens so far, under `_version`
    _version: int = 0

    @property
    def finish_reason(self) -> str:
        return "abort" if self.aborted else self.script.finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        return None if self.aborted else self.script.stop_reason

    async def steps(self, size: int) -> AsyncGenerator[Step]:
        """Samples up to `size` tokens at a time. The last step may have no token. Raises FaultError."""
        loop = asyncio.get_running_loop()
        total = len(self.script.ids)
        fault_at = min(self.script.turn.fail_after, max(total - 1, 0)) if self.fault else None
        async with self.policy.admission():
            aborts = self.policy.aborts
            if self.script.turn.delay:
                await asyncio.sleep(self.script.turn.delay)
            due = loop.time()
            self._state = self.script.state
            while True:
                if fault_at is not None and self.sampled >= fault_at:
                    await self._raise_fault()
                if await self.policy.wait_while_paused():
                    due = loop.time()
                if self.policy.aborts != aborts:
                    self.aborted = True
                    yield Step(self.sampled, self.sampled, [], [], is_last=True)
                    return
                stop = min(self.sampled + size, total if fault_at is None else fault_at)
                yield self._sample(stop)
                if stop == total:
                    return
                if self.script.turn.token_delay is not None:
                    due = max(due, loop.time())  # a delay is kept after a stall too; a rate catches up
                due += self.interval * size
                await asyncio.sleep(max(due - loop.time(), 0))

    async def _raise_fault(self) -> None:
        assert self.fault is not None
        if self.fault == "hang":
            await asyncio.Event().wait()
        raise FaultError(self.fault)

    def _sample(self, stop: int) -> Step:
        start, version = self.sampled, self.policy.version
        if version != self._version:
            length = len(self.script.prompt) + start
            self._state = change_version(self._state, length, self._version, version)
            self._version = version
        states, logprobs = [], []
        for id in self.script.ids[start:stop]:
            states.append(self._state)
            logprobs.append(logprob(self._state, id))
            self._state = advance(self._state, id)
        self.sampled = stop
        if self.spans and self.spans[-1].version == version:
            self.spans[-1] = VersionSpan(version, self.spans[-1].start, stop)
        elif stop > start:
            self.spans.append(VersionSpan(version, start, stop))
        return Step(start, stop, states, logprobs, is_last=stop == len(self.script.ids))


class PrefixCache:
    """Which blocks of context were computed before: an estimate of what an engine's prefix cache would hold."""

    def __init__(self, capacity: int = 1 << 17) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._capacity = capacity

    def count_cached_tokens(self, script: Script) -> int:
        """Of the prompt's last token something must always be computed, so a whole prompt is never cached."""
        blocks = script.blocks[: (len(script.prompt) - 1) // BLOCK_TOKENS]
        known = next((place for place, block in enumerate(blocks) if block not in self._blocks), len(blocks))
        return known * BLOCK_TOKENS

    def add(self, script: Script, sampled: int) -> None:
        """The prompt and the first `sampled` tokens of the output."""
        blocks = list(script.blocks)
        state = script.state
        for length, id in enumerate(script.ids[:sampled], len(script.prompt) + 1):
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
