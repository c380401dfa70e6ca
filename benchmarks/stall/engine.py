"""An engine that answers at once, whatever it is sent: `python -m benchmarks.stall.engine TOKENIZER_DIR`.

It is a process of its own, so that reading long prompts costs nobody else anything. It prints its address.
"""

import sys

import msgspec
from aiohttp import web

from benchmarks.process import print_message, run_async, wait_for_input_end
from polar.rendering.tokenizer import Tokenizer

CONTEXT_LENGTH = 131_072


async def serve(folder: str) -> None:
    tokenizer = Tokenizer.load(folder)
    ids = [*tokenizer.encode("Done."), *([] if tokenizer.eos_id is None else [tokenizer.eos_id])]
    choice = {
        "message": {"content": "Done."},
        "token_ids": ids,
        "logprobs": {"content": [{"token": "x", "logprob": -0.1}] * len(ids)},
        "finish_reason": "stop",
    }
    usage = {"prompt_tokens": 1, "completion_tokens": len(ids)}
    reply = msgspec.json.encode({"choices": [choice], "usage": usage, "prompt_token_ids": [1]})
    models = msgspec.json.encode({"data": [{"id": "stall", "max_model_len": CONTEXT_LENGTH}]})

    async def answer(request: web.BaseRequest) -> web.Response:
        async for _ in request.content.iter_any():
            pass
        return web.Response(body=models if request.method == "GET" else reply, content_type="application/json")

    runner = web.ServerRunner(web.Server(answer, access_log=None))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print_message(f"http://127.0.0.1:{runner.addresses[0][1]}")
    await wait_for_input_end()


if __name__ == "__main__":
    run_async(serve(sys.argv[1]))
