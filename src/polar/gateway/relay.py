"""A generation, written to the harness that asked for it: as a stream while it is sampled, or whole at its end.

The last byte goes out only after the exchange is durable, which is when a generation says that it is finished.
"""

import asyncio
from collections.abc import Callable

from aiohttp import web

from polar.gateway.generation import Generation

_WRITE_GAP_SECONDS = 0.05
"""Seconds between two writes that are to arrive as two."""


async def send_reply(request: web.BaseRequest, generation: Generation) -> web.StreamResponse:
    while not generation.finished:
        await generation.wait_for_events(len(generation.events))
    if generation.error is not None:
        generation.mark_served()
        raise generation.error
    call = generation.call
    body = call.dialect.encode_reply(call.request, generation.capture.build_reply())
    response = web.Response(body=body, content_type="application/json")
    # Written here rather than on return, so that we know whether the harness was still there.
    await response.prepare(request)
    await response.write_eof()
    generation.mark_served()
    return response


async def send_stream(
    request: web.BaseRequest, generation: Generation, keep_alive_seconds: float
) -> web.StreamResponse:
    """`patience` is how long a harness is left without a byte: not everything that is sampled has text to show."""
    keep_alive = _KeepAliveTimer(keep_alive_seconds, generation.wake)
    try:
        return await _send_stream(request, generation, keep_alive)
    finally:
        keep_alive.cancel()


async def _send_stream(
    request: web.BaseRequest, generation: Generation, keep_alive: "_KeepAliveTimer"
) -> web.StreamResponse:
    call, capture = generation.call, generation.capture
    encoder = call.dialect.create_stream_encoder(call.request, capture.exchange_id, capture.created)
    response: web.StreamResponse | None = None
    sent_events = 0
    while True:
        await generation.wait_for_events(sent_events)
        ready = generation.events[sent_events:]
        pieces = []
        last_shown_event = 0
        for index, event in enumerate(ready, sent_events + 1):
            if index == 1:
                pieces.append(encoder.start(capture.prompt_usage))
            if piece := encoder.feed(event):
                pieces.append(piece)
                last_shown_event = index
        sent_events += len(ready)
        ended = generation.finished and sent_events == len(generation.events)
        if response is None and ended and generation.error is not None and not pieces:
            # Nothing has been said yet: the error can still have its own status.
            generation.mark_served()
            raise generation.error
        if ended and generation.error is not None:
            if pieces:
                response = response or await _start_response(request, encoder.content_type)
                await response.write(b"".join(pieces))
            # Google's clients take an error for one only if it comes in a piece of its own.
            await asyncio.sleep(_WRITE_GAP_SECONDS)
            pieces = [encoder.error(generation.error)]
        elif ended:
            pieces.append(encoder.finish(capture.build_reply()))
        elif not pieces and keep_alive.is_due:
            pieces.append(encoder.keep_alive())
        if pieces:
            if response is None:
                response = await _start_response(request, encoder.content_type)
            await response.write(b"".join(pieces))
            keep_alive.reset()
        if last_shown_event:
            generation.mark_delivered(last_shown_event)
        if ended:
            break
    assert response is not None
    await response.write_eof()
    generation.mark_served()
    return response


class _KeepAliveTimer:
    """How long nothing has been written. One timer for a stream, not one for each token: it comes when the time may be
    up, looks, and wakes whoever should say something."""

    def __init__(self, keep_alive_seconds: float, wake: Callable[[], None]) -> None:
        self._keep_alive_seconds = keep_alive_seconds
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self._due = self._loop.time() + keep_alive_seconds
        self._timer = self._loop.call_at(self._due, self._check)

    @property
    def is_due(self) -> bool:
        return self._loop.time() >= self._due

    def reset(self) -> None:
        self._due = self._loop.time() + self._keep_alive_seconds

    def cancel(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        if self.is_due:
            self._wake()
            self._timer = self._loop.call_later(self._keep_alive_seconds, self._check)
        else:
            self._timer = self._loop.call_at(self._due, self._check)


async def _start_response(request: web.BaseRequest, content_type: str) -> web.StreamResponse:
    headers = {"Content-Type": content_type, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    return response
