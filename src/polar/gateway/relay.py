"""A generation, written to the harness that asked for it: as a stream while it is sampled, or whole at its end.

The last byte goes out only after the exchange is durable, which is when a generation says that it is finished.
"""

import asyncio
from collections.abc import Callable

from aiohttp import web

from polar.gateway.generation import Generation

_APART = 0.05
"""Seconds between two writes that are to arrive as two."""


async def send_whole(request: web.BaseRequest, generation: Generation) -> web.StreamResponse:
    while not generation.finished:
        await generation.more(len(generation.events))
    if generation.error is not None:
        generation.served()
        raise generation.error
    call = generation.call
    body = call.dialect.encode_reply(call.request, generation.capture.reply())
    response = web.Response(body=body, content_type="application/json")
    # Written here rather than on return, so that we know whether the harness was still there.
    await response.prepare(request)
    await response.write_eof()
    generation.served()
    return response


async def send_stream(request: web.BaseRequest, generation: Generation, patience: float) -> web.StreamResponse:
    """`patience` is how long a harness is left without a byte: not everything that is sampled has text to show."""
    silence = _Silence(patience, generation.wake)
    try:
        return await _send_stream(request, generation, silence)
    finally:
        silence.forget()


async def _send_stream(request: web.BaseRequest, generation: Generation, silence: "_Silence") -> web.StreamResponse:
    call, capture = generation.call, generation.capture
    encoder = call.dialect.stream(call.request, capture.exchange_id, capture.created)
    response: web.StreamResponse | None = None
    done = 0
    while True:
        await generation.more(done)
        ready = generation.events[done:]
        pieces = []
        written = 0
        for index, event in enumerate(ready, done + 1):
            if index == 1:
                pieces.append(encoder.start(capture.prompt_usage))
            if piece := encoder.feed(event):
                pieces.append(piece)
                written = index
        done += len(ready)
        ended = generation.finished and done == len(generation.events)
        if response is None and ended and generation.error is not None and not pieces:
            # Nothing has been said yet: the error can still have its own status.
            generation.served()
            raise generation.error
        if ended and generation.error is not None:
            if pieces:
                response = response or await _begin(request, encoder.content_type)
                await response.write(b"".join(pieces))
            # Google's clients take an error for one only if it comes in a piece of its own.
            await asyncio.sleep(_APART)
            pieces = [encoder.error(generation.error)]
        elif ended:
            pieces.append(encoder.finish(capture.reply()))
        elif not pieces and silence.too_long:
            pieces.append(encoder.keep_alive())
        if pieces:
            if response is None:
                response = await _begin(request, encoder.content_type)
            await response.write(b"".join(pieces))
            silence.broken()
        if written:
            generation.delivered(written)
        if ended:
            break
    assert response is not None
    await response.write_eof()
    generation.served()
    return response


class _Silence:
    """How long nothing has been written. One timer for a stream, not one for each token: it comes when the time may be
    up, looks, and wakes whoever should say something."""

    def __init__(self, patience: float, wake: Callable[[], None]) -> None:
        self._patience = patience
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self._due = self._loop.time() + patience
        self._timer = self._loop.call_at(self._due, self._look)

    @property
    def too_long(self) -> bool:
        return self._loop.time() >= self._due

    def broken(self) -> None:
        self._due = self._loop.time() + self._patience

    def forget(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        if self.too_long:
            self._wake()
            self._timer = self._loop.call_later(self._patience, self._look)
        else:
            self._timer = self._loop.call_at(self._due, self._look)


async def _begin(request: web.BaseRequest, content_type: str) -> web.StreamResponse:
    headers = {"Content-Type": content_type, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    return response
