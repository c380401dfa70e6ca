"""Prompts from another process are those of this one; and processes that die, or hang, are replaced."""

import asyncio
import os
import random
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from polar.engines.scripted import TOKENIZER_FOLDER
from polar.rendering import worker_pool
from polar.rendering.continuation import RecordedTurn, TurnHistory
from polar.rendering.encoder import SPELLING_BREAK, NewTextLimitExceeded, limit_new_text
from polar.rendering.model_codec import ModelCodec
from polar.rendering.prompt_job import ContextExceeded, PromptJob, RenderedPrompt, make_prompt
from polar.rendering.template import TemplateError
from polar.rendering.turn_digest import digest_turn
from polar.rendering.worker import WorkerSetup
from polar.rendering.worker_pool import RenderTimeout, WorkerDied, WorkerPool
from polar.types import Message, Raw, Request, Text, Tool, ToolCall, ToolResult

HANGS = "{% if messages[0].content == 'hang' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
HANGS += "{% endfor %}{% endif %}{% if messages[0].content == 'refuse' %}{{ raise_exception('no') }}{% endif %}"


@pytest_asyncio.fixture
async def folder(tmp_path: Path) -> Path:
    """The scripted model's, with a template that can be made to hang or to refuse."""
    made = tmp_path / "model"
    shutil.copytree(TOKENIZER_FOLDER, made)
    template = made / "chat_template.jinja"
    template.write_text(HANGS + template.read_text())
    return made


@pytest_asyncio.fixture
async def pool(folder: Path) -> AsyncIterator[WorkerPool]:
    made = WorkerPool(WorkerSetup(str(folder), "auto", {}, SPELLING_BREAK))
    yield made
    processes = made.process_ids
    await made.close()
    for pid in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def ask(text: str) -> Request:
    return Request("m", [Message("user", [Text(text)])], tools=[Tool("f", parameters=Raw(b'{"type":"object"}'))])


def job(request: Request, history: TurnHistory | None = None, context_length: int | None = None) -> PromptJob:
    return PromptJob.from_request(request, history or TurnHistory(), {}, context_length)


async def running(pool: WorkerPool, *, but: int | None = None) -> int:
    """A process that runs now, another one than `but`."""
    async with asyncio.timeout(60):
        while not (found := [pid for pid in pool.process_ids if pid != but]):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return found[0]


def same(one: RenderedPrompt, other: RenderedPrompt) -> None:
    assert one.ids.tolist() == other.ids.tolist()
    whole = slice(len(SPELLING_BREAK), None)  # a mark that is cut at the beginning is each process's own
    assert one.prompt_end[whole] == other.prompt_end[whole]
    assert (one.base, one.ids_json, one.mark, one.reason) == (other.base, other.ids_json, other.mark, other.reason)


@pytest.mark.asyncio
async def test_prompts_are_those_that_this_process_makes(pool: WorkerPool, folder: Path) -> None:
    model = ModelCodec.load(folder)
    rng = random.Random(7)
    alphabet = [*"abc \n\t{}0é中🙂\x00\x01", "<|im_start|>", "<|im_end|>", "<think>", "</tool_call>", "word "]
    for size in (0, 10, 1_000, 50_000, 500_000):
        text = "".join(rng.choices(alphabet, k=size))
        request = ask(text)
        same(await pool.make_prompt("s", job(request)), make_prompt(model, request, TurnHistory(), {}, None))
    assert len(pool.process_ids) == 2  # long texts, and very long ones


@pytest.mark.asyncio
async def test_a_prompt_goes_on_from_recorded_ids(pool: WorkerPool, folder: Path) -> None:
    model = ModelCodec.load(folder)
    first = ask("long " * 30_000)
    begun = await pool.make_prompt("s", job(first))
    assert begun.base is None
    assert begun.mark is not None
    said = [Text("Well."), ToolCall("c1", "f", '{"n": 1.0}')]
    history = TurnHistory()
    history.add(RecordedTurn("x1", 0, begun.mark, digest_turn(said), len(begun.ids), 7, 7), said)
    answered = [
        *first.messages,
        Message("assistant", said),
        Message("tool", [ToolResult("c1", [Text("more " * 30_000)])]),
    ]
    request = Request("m", answered, tools=first.tools)
    made = await pool.make_prompt("s", job(request, history))
    assert made.base == ("x1", 7, 0)
    assert made.reason is None
    same(made, make_prompt(model, request, history, {}, None))


@pytest.mark.asyncio
async def test_failures_are_told_as_here(pool: WorkerPool) -> None:
    with pytest.raises(TemplateError, match="no"):
        await pool.make_prompt("s", job(ask("refuse")))
    with pytest.raises(ContextExceeded):
        await pool.make_prompt("s", job(ask("a b c " * 200_000), context_length=4096))
    assert (await pool.make_prompt("s", job(ask("hello"), context_length=4096))).ids.size


@pytest.mark.asyncio
async def test_a_killed_process_is_replaced_and_its_job_done(pool: WorkerPool) -> None:
    expected = await pool.make_prompt("s", job(ask("hello")))
    pid = await running(pool)
    os.kill(pid, signal.SIGSTOP)
    making = asyncio.create_task(pool.make_prompt("s", job(ask("hello"))))
    await asyncio.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    same(await making, expected)
    assert await running(pool) != pid


@pytest.mark.asyncio
async def test_a_job_that_kills_its_process_is_given_up(pool: WorkerPool) -> None:
    making = asyncio.create_task(pool.make_prompt("s", job(ask("hang"))))
    first = await running(pool)
    os.kill(first, signal.SIGKILL)
    second = await running(pool, but=first)
    os.kill(second, signal.SIGKILL)
    with pytest.raises(WorkerDied):
        await making
    assert (await pool.make_prompt("s", job(ask("hello")))).ids.size


@pytest.mark.asyncio
async def test_a_job_that_hangs_is_given_up(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    await pool.make_prompt("s", job(ask("hello")))
    monkeypatch.setattr(worker_pool, "JOB_SECONDS", 0.2)
    with pytest.raises(RenderTimeout):
        await pool.make_prompt("s", job(ask("hang")))
    monkeypatch.undo()
    assert (await pool.make_prompt("s", job(ask("hello")))).ids.size


@pytest.mark.asyncio
async def test_who_goes_away_leaves_the_process_to_others(pool: WorkerPool) -> None:
    await pool.make_prompt("s", job(ask("hello")))
    pid = await running(pool)
    leaving = asyncio.create_task(pool.make_prompt("s", job(ask("word " * 50_000))))
    await asyncio.sleep(0.01)
    leaving.cancel()
    assert (await pool.make_prompt("other", job(ask("hello")))).ids.size
    assert pool.process_ids == [pid]


def test_much_new_text_is_refused_once(folder: Path) -> None:
    model = ModelCodec.load(folder)
    request = ask("word " * 1_000)
    with pytest.raises(NewTextLimitExceeded), limit_new_text(1_000):
        make_prompt(model, request, TurnHistory(), {}, None)
    make_prompt(model, request, TurnHistory(), {}, None)
    with limit_new_text(1_000):  # it is known by now
        make_prompt(model, request, TurnHistory(), {}, None)
