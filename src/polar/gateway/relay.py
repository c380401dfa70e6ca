"""A generation, written to the harness that asked for it: as a stream while it is sampled, or whole at its end.

The last byte goes out only after the exchange is durable, which is when a generation says that it is finished.
"""

from aiohttp import web

from polar.gateway.generation import Generation

_FOREVER = 3600.0  # engines have a time limit of their own


async def send_whole(request: web.BaseRequest, generation: Generation) -> web.StreamResponse:
    while not generation.finished:
        await generation.more(len(generation.chunks), _FOREVER)
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
    call, capture = generation.call, generation.capture
    encoder = call.dialect.stream(call.request, capture.exchange_id, capture.created)
    response: web.StreamResponse | None = None
    started = False
    done = 0
    while True:
        heard = await generation.more(done, patience)
        ready = generation.chunks[done:]
        if response is None:
            # Until something is to be said, an error can still have its own status.
            if generation.finished and generation.error is not None and not ready:
                generation.served()
                raise generation.error
            response = web.StreamResponse(
                headers={"Content-Type": encoder.content_type, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            )
            await response.prepare(request)
        if not heard:
            await response.write(encoder.keep_alive())
            continue
        pieces = []
        written = 0
        for index, chunk in enumerate(ready, done + 1):
            if not started:
                started = True
                pieces.append(encoder.start(capture.prompt_usage))
            for event in chunk.events:
                if piece := encoder.feed(event):
                    pieces.append(piece)
                    written = index
        done += len(ready)
        if data := b"".join(pieces):
            await response.write(data)
        if written:
            generation.delivered(written)
        if generation.finished and done == len(generation.chunks):
            break
    if generation.error is not None:
        await response.write(encoder.error(generation.error))
    else:
        await response.write(encoder.finish(capture.reply()))
    await response.write_eof()
    generation.served()
    return response
