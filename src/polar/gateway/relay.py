"""A generation, written to the harness that asked for it: as a stream while it is sampled, or whole at its end.

The last byte goes out only after the exchange is durable, which is when a generation says that it is finished.
"""

import asyncio

from aiohttp import web

from polar.gateway.generation import Generation

_FOREVER = 3600.0  # engines have a time limit of their own


async def send_whole(request: web.BaseRequest, generation: Generation) -> web.StreamResponse:
    while not generation.finished:
        await generation.more(len(generation.events), _FOREVER)
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
    call, capture = generation.call, generation.capture
    encoder = call.dialect.stream(call.request, capture.exchange_id, capture.created)
    now = asyncio.get_running_loop().time
    due = now() + patience
    response: web.StreamResponse | None = None
    done = 0
    while True:
        await generation.more(done, max(0.0, due - now()))
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
        if ended:
            pieces.append(encoder.error(generation.error) if generation.error else encoder.finish(capture.reply()))
        elif not pieces and now() >= due:
            pieces.append(encoder.keep_alive())
        if pieces:
            if response is None:
                response = await _begin(request, encoder.content_type)
            await response.write(b"".join(pieces))
            due = now() + patience
        if written:
            generation.delivered(written)
        if ended:
            break
    assert response is not None
    await response.write_eof()
    generation.served()
    return response


async def _begin(request: web.BaseRequest, content_type: str) -> web.StreamResponse:
    headers = {"Content-Type": content_type, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    return response
