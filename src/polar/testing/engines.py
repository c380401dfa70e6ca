"""The contract of every engine:

    class TestMine(EngineContract):
        plugin = Mine

        @asynccontextmanager
        async def serve(self):
            async with MyServer() as server:      # a real server of yours, or one that answers like it
                yield server.url

The server may answer anything, as long as a reply has a few tokens.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import Any, ClassVar, get_args

import numpy as np
import pytest
import pytest_asyncio

from polar.config import EngineSettings
from polar.engines.base import Capabilities, Chunk, Engine, EngineState, TokenPrompt
from polar.errors import EngineError
from polar.records.exchange import LogprobKind
from polar.testing import leftovers
from polar.testing.contract import Contract, assert_helpful, requires
from polar.types import FinishReason, Message, Request, SamplingParams, Text, TextDelta

PROMPT_IDS = (5, 6, 7, 8)
_UNREACHABLE = "http://127.0.0.1:1"
_WAIT_SECONDS = 60.0


class EngineContract(Contract):
    kind = "engines"
    settings: ClassVar[Mapping[str, Any]] = {}  # fields of EngineSettings
    is_deterministic: ClassVar[bool] = False  # whether the same prompt, sampled at temperature 0, has the same reply
    accepts_token_ids: ClassVar[bool] = True  # these four are compared with what the engine says
    tells_context_length: ClassVar[bool] = True
    can_freeze: ClassVar[bool] = True
    can_sleep: ClassVar[bool] = True

    def serve(self) -> AbstractAsyncContextManager[str]:
        """Starts a server for this engine and yields its address."""
        raise NotImplementedError(f"{type(self).__name__} has no server: override `serve`")

    def make_engine(self, url: str) -> Engine:
        made: Engine = self.plugin(url, EngineSettings.model_validate({"timeout": 60, **self.settings}))
        return made

    @asynccontextmanager
    async def open_engine(self) -> AsyncIterator[Engine]:
        async with self.serve() as url:
            engine = self.make_engine(url)
            try:
                yield engine
            finally:
                await engine.close()

    @pytest_asyncio.fixture
    async def engine(self) -> AsyncIterator[Engine]:
        """A started engine."""
        async with self.open_engine() as engine:
            await engine.start()
            yield engine

    def make_request(self, **sampling: Any) -> Request:
        return Request("any-model", [Message("user", [Text("Say hello.")])], sampling=SamplingParams(**sampling))

    async def sample(self, engine: Engine, request: Request, *, stream: bool, ids: tuple[int, ...] = ()) -> list[Chunk]:
        """Samples a reply to the request's messages or, with `ids`, to a prompt of token ids."""
        prompt = TokenPrompt(np.array(ids, np.int32), ",".join(map(str, ids)).encode()) if ids else None
        async with aclosing(engine.generate(request, stream=stream, prompt=prompt)) as chunks:
            return [chunk async for chunk in chunks]

    # What there is

    async def test_it_finds_out_what_the_server_can_do(self) -> None:
        async with self.open_engine() as engine:
            capabilities = await engine.start()
            assert isinstance(capabilities, Capabilities)
            assert engine.capabilities == capabilities
            assert capabilities.models
            assert capabilities.logprobs in get_args(LogprobKind)
            assert capabilities.context_length is None or capabilities.context_length > 0
            assert engine.url.startswith("http")
            assert not engine.url.endswith("/")
            assert await engine.get_state() in (None, *get_args(EngineState))
            assert isinstance(await engine.reports_version_spans(), bool)
            running, started_at = await engine.count_running_calls(), await engine.get_process_start_time()
            assert running is None or running >= 0
            assert started_at is None or started_at > 0
            folder = engine.find_tokenizer_folder()
            assert folder is None or isinstance(folder, str)

    async def test_it_can_do_what_the_suite_was_told(self, engine: Engine) -> None:
        """What is declared decides which tests there are, so it must be what the engine says of itself."""
        found = {"accepts_token_ids": engine.capabilities.accepts_token_ids}
        found["tells_context_length"] = engine.capabilities.context_length is not None
        if found_freeze := await engine.freeze():
            await engine.thaw()
        if found_sleep := await engine.sleep():
            await engine.wake()
        found |= {"can_freeze": found_freeze, "can_sleep": found_sleep}
        assert found == {name: getattr(self, name) for name in found}

    async def test_sampling_is_filled_in_and_what_was_asked_for_stays(self, engine: Engine) -> None:
        requested = SamplingParams(temperature=0.25, top_p=0.5, max_tokens=7, stop=["END"])
        applied = engine.apply_sampling_defaults(requested)
        assert (applied.temperature, applied.top_p, applied.max_tokens, applied.stop) == (0.25, 0.5, 7, ["END"])
        assert engine.apply_sampling_defaults(SamplingParams()).temperature is not None
        assert requested == SamplingParams(temperature=0.25, top_p=0.5, max_tokens=7, stop=["END"])

    # Replies

    @pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
    async def test_a_reply_to_messages(self, engine: Engine, stream: bool) -> None:
        chunks = await self.sample(engine, self.make_request(), stream=stream)
        assert_well_formed(chunks)
        assert "".join(event.text for chunk in chunks for event in chunk.events if isinstance(event, TextDelta))
        usage = [chunk.usage for chunk in chunks if chunk.usage is not None]
        assert usage[-1].prompt > 0
        assert usage[-1].completion > 0

    @requires("accepts_token_ids")
    @pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
    async def test_ids_in_and_ids_out(self, engine: Engine, stream: bool) -> None:
        chunks = await self.sample(engine, self.make_request(max_tokens=5), stream=stream, ids=PROMPT_IDS)
        assert_well_formed(chunks)
        ids = [id for chunk in chunks for id in chunk.ids]
        assert 0 < len(ids) <= 5
        assert not [event for chunk in chunks for event in chunk.events]  # the gateway reads the ids itself
        if engine.capabilities.logprobs != "none":
            logprobs = [value for chunk in chunks for value in chunk.logprobs or []]
            assert len(logprobs) == len(ids)
        for chunk in chunks:
            assert chunk.prompt_ids is None or chunk.prompt_ids.tolist() == list(PROMPT_IDS)

    @requires("accepts_token_ids")
    async def test_a_limit_is_kept_and_said(self, engine: Engine) -> None:
        chunks = await self.sample(engine, self.make_request(max_tokens=2), stream=True, ids=PROMPT_IDS)
        assert sum(len(chunk.ids) for chunk in chunks) == 2
        assert get_finish_reason(chunks) == "length"

    @requires("is_deterministic", "accepts_token_ids")
    async def test_the_same_prompt_has_the_same_reply(self, engine: Engine) -> None:
        request = self.make_request(max_tokens=5, temperature=0.0)
        replies = [await self.sample(engine, request, stream=stream, ids=PROMPT_IDS) for stream in (False, True, True)]
        ids = [[id for chunk in chunks for id in chunk.ids] for chunks in replies]
        assert ids[0] == ids[1] == ids[2]

    async def test_calls_at_the_same_time(self, engine: Engine) -> None:
        replies = await asyncio.gather(*(self.sample(engine, self.make_request(), stream=True) for _ in range(8)))
        for chunks in replies:
            assert_well_formed(chunks)

    async def test_counting_is_sampling_the_prompt(self, engine: Engine) -> None:
        """Or is refused in so many words."""
        try:
            counted = await engine.count_tokens(self.make_request())
        except EngineError as error:
            assert error.kind == "unsupported"  # noqa: PT017  it may also count
            assert_helpful(error)
            return
        chunks = await self.sample(engine, self.make_request(), stream=False)
        assert counted == next(chunk.usage.prompt for chunk in reversed(chunks) if chunk.usage is not None)

    # Breaking off

    async def test_closing_early_breaks_the_sampling_off(self, engine: Engine) -> None:
        for _ in range(3):
            chunks = engine.generate(self.make_request(), stream=True)
            await anext(chunks)
            await chunks.aclose()
        await self.wait_until_idle(engine)
        assert_well_formed(await self.sample(engine, self.make_request(), stream=True))

    async def test_a_cancelled_call_breaks_the_sampling_off(self, engine: Engine) -> None:
        sampling = asyncio.create_task(self.sample(engine, self.make_request(), stream=False))
        await asyncio.sleep(0)
        sampling.cancel()
        await asyncio.gather(sampling, return_exceptions=True)
        await self.wait_until_idle(engine)
        assert_well_formed(await self.sample(engine, self.make_request(), stream=False))

    async def wait_until_idle(self, engine: Engine) -> None:
        """Returns at once where the engine does not report how many calls run."""
        async with asyncio.timeout(_WAIT_SECONDS):
            while await engine.count_running_calls():  # noqa: ASYNC110  the server is asked
                await asyncio.sleep(0.02)

    # Failures

    async def test_a_server_that_is_not_there(self) -> None:
        """Another replica may well succeed."""
        engine = self.make_engine(_UNREACHABLE)
        try:
            with pytest.raises(EngineError) as error:
                await engine.start()
            assert_helpful(error.value)
            with pytest.raises(EngineError) as error:
                await self.sample(engine, self.make_request(), stream=True)
            assert_helpful(error.value)
            assert error.value.retry_elsewhere
        finally:
            await engine.close()

    @requires("accepts_token_ids", "tells_context_length")
    async def test_a_prompt_that_no_context_holds(self, engine: Engine) -> None:
        length = engine.capabilities.context_length
        assert length is not None
        with pytest.raises(EngineError) as error:
            await self.sample(engine, self.make_request(), stream=True, ids=(1,) * (length + 1))
        assert error.value.kind == "context_length"
        assert_helpful(error.value)

    # States

    @requires("can_freeze")
    async def test_what_can_be_frozen_goes_on_when_it_is_thawed(self, engine: Engine) -> None:
        assert await engine.freeze()
        assert await engine.get_state() in (None, "frozen")
        sampling = asyncio.create_task(self.sample(engine, self.make_request(), stream=True))
        await asyncio.sleep(0.05)
        assert not sampling.done()
        await engine.thaw()
        assert_well_formed(await sampling)
        assert await engine.get_state() in (None, "running")

    @requires("can_sleep")
    async def test_what_can_sleep_wakes_up_again(self, engine: Engine) -> None:
        assert await engine.sleep()
        assert await engine.get_state() in (None, "asleep")
        await engine.wake()
        assert_well_formed(await self.sample(engine, self.make_request(), stream=True))

    # What it leaves behind

    async def test_connections_are_counted_and_closed(self) -> None:
        async with self.serve() as url:
            before = leftovers.count_open_descriptors()
            engine = self.make_engine(url)
            await engine.start()
            await self.sample(engine, self.make_request(), stream=True)
            assert engine.connections_opened > 0
            await engine.close()
            await engine.close()
            async with asyncio.timeout(_WAIT_SECONDS):
                while leftovers.count_open_descriptors() > before:  # noqa: ASYNC110  the server's end of each is closed, too
                    await asyncio.sleep(0.02)


def get_finish_reason(chunks: list[Chunk]) -> FinishReason | None:
    return next((chunk.finish_reason for chunk in reversed(chunks) if chunk.finish_reason is not None), None)


def assert_well_formed(chunks: list[Chunk]) -> None:
    """Asserts that the reply is complete and that its log-probabilities are possible."""
    assert get_finish_reason(chunks) in get_args(FinishReason)
    for chunk in chunks:
        assert all(isinstance(id, int) and id >= 0 for id in chunk.ids)
        assert not chunk.ids or chunk.logprobs is None or len(chunk.logprobs) == len(chunk.ids)
        for value in chunk.logprobs or []:
            assert value is None or (math.isfinite(value) and value <= 0)
