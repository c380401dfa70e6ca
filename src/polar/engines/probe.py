"""What an engine really does, found by asking it: the conformance test behind `polar doctor`.

Each check is one or two small calls and ends in a finding: what was seen, and what follows from it for training.
"""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
from msgspec import Raw, Struct

from polar.engines.base import Chunk, Engine
from polar.errors import EngineError
from polar.records.exchange import LogprobKind
from polar.types import Message, Request, SamplingParams, Text, Tool


class Finding(Struct):
    check: str
    ok: bool | None  # None: could not be checked
    seen: str
    follows: str


class ProbeReply(Struct):
    """All that one call gave."""

    chunks: list[Chunk]

    @property
    def ids(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.ids]

    @property
    def logprobs(self) -> list[float | None]:
        return [value for chunk in self.chunks for value in chunk.logprobs or ()]

    @property
    def prompt(self) -> list[int] | None:
        found: list[int] | None = None
        for chunk in self.chunks:
            if chunk.prompt_ids is not None:
                found = chunk.prompt_ids.tolist()
            elif chunk.prompt_json is not None:
                found = msgspec.json.decode(chunk.prompt_json, type=list[int])
        return found


def _make_request(
    words: str, *, temperature: float = 1.0, max_tokens: int = 16, logprobs: int | None = None
) -> Request:
    return Request(
        model="",
        messages=[Message("user", [Text(words)])],
        sampling=SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=7),
        logprobs=logprobs,
    )


async def _sample(engine: Engine, request: Request, *, stream: bool) -> ProbeReply:
    return ProbeReply([chunk async for chunk in engine.generate(request, stream=stream)])


async def detect_logprob_kind(engine: Engine) -> LogprobKind:
    """Whether log-probabilities are the model's own (raw) or those after temperature (processed): the same first
    token's alternatives at two temperatures."""
    tables = []
    for temperature in (1.0, 0.5):
        request = _make_request("Name a colour.", temperature=temperature, max_tokens=1, logprobs=5)
        sample = await _sample(engine, request, stream=False)
        found = [token for chunk in sample.chunks for token in chunk.alternatives or ()][:1]
        tables.append({entry.token: entry.logprob for token in found for entry in (token, *token.top_logprobs)})
    common = tables[0].keys() & tables[1].keys()
    if not common:
        return "none"
    moved = max(abs(tables[0][token] - tables[1][token]) for token in common)
    return "processed" if moved > 0.05 else "raw"


async def probe_engine(engine: Engine) -> list[Finding]:
    """All checks, in order. A check that fails does not stop the others, but an engine that can't be reached does."""
    findings = [await _run_check("reachable", engine, _check_reachable)]
    if findings[0].ok:
        for name, check in _CHECKS.items():
            findings.append(await _run_check(name, engine, check))
    return findings


Check = Callable[[Engine], Awaitable[tuple[bool | None, str, str]]]


async def _run_check(name: str, engine: Engine, check: Check) -> Finding:
    try:
        async with asyncio.timeout(120):
            return Finding(name, *await check(engine))
    except EngineError as error:
        return Finding(
            name, False, str(error), "fix this first: nothing can be captured while the engine refuses calls"
        )
    except TimeoutError:
        return Finding(name, False, "no answer within 120 s", "the engine hangs or is much too slow")


async def _check_reachable(engine: Engine) -> tuple[bool | None, str, str]:
    found = await engine.start()
    length = f"context of {found.context_length} tokens" if found.context_length else "context length not told"
    return True, f"{', '.join(found.models)}; {length}", "harnesses may ask for any model name; this one answers"


async def _check_token_ids(engine: Engine) -> tuple[bool | None, str, str]:
    sample = await _sample(engine, _make_request("Say hello."), stream=False)
    if not sample.ids or sample.prompt is None:
        return False, "replies without token ids", "calls are captured as text and can't be trained on"
    seen = f"{len(sample.prompt)} prompt ids and {len(sample.ids)} sampled ids"
    return True, seen, "calls are trainable: what was sampled, and in which context, is known exactly"


async def _check_streamed_ids(engine: Engine) -> tuple[bool | None, str, str]:
    sample = await _sample(engine, _make_request("Count to ten.", max_tokens=24), stream=True)
    pieces = sum(bool(chunk.ids) for chunk in sample.chunks)
    if not sample.ids:
        return False, "a stream without token ids", "streaming harnesses are captured as text only"
    if pieces < 2:
        return False, "the whole reply in one piece", "harnesses wait for the whole turn before they see a token"
    return True, f"{len(sample.ids)} ids in {pieces} pieces", "harnesses see tokens as they are sampled"


async def _check_logprobs(engine: Engine) -> tuple[bool | None, str, str]:
    for stream in (False, True):
        sample = await _sample(engine, _make_request("Say hello."), stream=stream)
        if len(sample.logprobs) != len(sample.ids) or None in sample.logprobs:
            how = "streamed" if stream else "whole"
            seen = f"{len(sample.logprobs)} log-probabilities for {len(sample.ids)} tokens ({how} replies)"
            return False, seen, "the trainer must recompute them: set [engine] logprobs = false"
    return True, "one per sampled token, streamed and whole", "the trainer can use the sampler's own probabilities"


async def _check_logprob_kind(engine: Engine) -> tuple[bool | None, str, str]:
    kind = await detect_logprob_kind(engine)
    if kind == "processed":
        follows = "they are what was sampled from, also with temperature and forced tools"
    elif kind == "raw":
        follows = "train at temperature 1 and without top-p or top-k, or divide the trainer's logits by the temperature"
    else:
        return False, "no alternatives to compare", "Polar can't tell and assumes raw ones"
    return True, kind, follows


async def _check_tools(engine: Engine) -> tuple[bool | None, str, str]:
    request = _make_request("What is the weather in Oslo?", max_tokens=8)
    schema = Raw(b'{"type":"object","properties":{"city":{"type":"string"}},"required":["city"]}')
    request.tools = [Tool("get_weather", "Weather of a city", schema)]
    try:
        await _sample(engine, request, stream=False)
    except EngineError as error:
        if error.kind != "invalid_request":
            raise
        return (
            False,
            str(error),
            "start the engine with its tool parser (vLLM: --enable-auto-tool-choice --tool-call-parser)",
        )
    return True, "a request with tools is accepted", "harnesses that use tools work"


async def _check_counting(engine: Engine) -> tuple[bool | None, str, str]:
    request = _make_request("How long is this?", max_tokens=1)
    count = await engine.count_tokens(request)
    prompt = (await _sample(engine, request, stream=False)).prompt
    if prompt is not None and len(prompt) != count:
        return False, f"counted {count}, sampled with {len(prompt)}", "harnesses would misjudge their context"
    return True, f"{count} tokens, as sampled with", "count_tokens is exact and samples nothing"


async def _check_clamping(engine: Engine) -> tuple[bool | None, str, str]:
    limit = engine.capabilities.context_length
    if limit is None:
        return True, "context length not told", "max_tokens is passed on as the harness asks"
    request = _make_request("Answer with one word.", max_tokens=limit * 2)
    stream = engine.generate(request, stream=True)
    async for _ in stream:
        break  # it was accepted, which is what we wanted to know
    await stream.aclose()
    return True, "more tokens than the context holds may be asked for", "the room that is left is the limit"


async def _check_versions(engine: Engine) -> tuple[bool | None, str, str]:
    if await engine.reports_version_spans():
        return True, "spans of tokens with their weights' version", "updates in mid-call are known token by token"
    follows = "tell Polar of updates (POST /policy) and pause across them; calls that run on meanwhile are not trained"
    return True, "not reported", follows


async def _check_abort(engine: Engine) -> tuple[bool | None, str, str]:
    before = await engine.count_running_calls()
    if before is None:
        return None, "the engine does not tell what it is running", "see that it stops when a stream is closed"
    stream = engine.generate(_make_request("Count to a thousand, in words.", max_tokens=1024), stream=True)
    async for _ in stream:
        break
    await stream.aclose()
    for _ in range(50):
        if (await engine.count_running_calls() or 0) <= before:
            return True, "a closed stream stops being sampled", "harnesses that go away cost nothing"
        await asyncio.sleep(0.1)
    return False, "sampling goes on after the stream was closed", "abandoned calls keep the engine busy"


_CHECKS: dict[str, Check] = {
    "token ids": _check_token_ids,
    "token ids in streams": _check_streamed_ids,
    "log-probabilities": _check_logprobs,
    "kind of log-probabilities": _check_logprob_kind,
    "tools": _check_tools,
    "token counting": _check_counting,
    "max_tokens beyond the context": _check_clamping,
    "policy versions": _check_versions,
    "abort": _check_abort,
}
