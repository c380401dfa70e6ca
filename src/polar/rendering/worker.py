"""A process that makes prompts: `python -m polar.rendering.worker`, started and fed by worker_pool.py.

Rendering and encoding a long text keeps an interpreter busy for seconds, so another one than the gateway's does it.
Messages on standard input and output are frames: a length of eight bytes, then as many bytes.

    in: WorkerSetup (JSON), then PromptJobs (pickled)        out: a PromptResult for each job (MessagePack)

Jobs are pickled since a request holds optional raw JSON (`Raw | None`), which msgspec writes and can't read. Only the
parent writes here, and nothing that comes back is unpickled.

The process ends when its input ends: with its parent, however that ends.
"""

import os
import pickle
import signal
import sys
from typing import Any, BinaryIO, Literal

import msgspec
import numpy as np
from msgspec import Struct

from polar.records.exchange import ContextMark
from polar.rendering.continuation import BranchReason, ContinuationMode
from polar.rendering.encoder import SPELLING_BREAK
from polar.rendering.model_codec import ModelCodec
from polar.rendering.prompt_job import ContextExceeded, PromptJob, PromptPrefix, RenderedPrompt, make_prompt
from polar.rendering.template import TemplateError

FRAME_LENGTH_BYTES = 8
_NICENESS = 5
"""Long texts wait a little longer, and nothing else is slowed down."""


class WorkerSetup(Struct):
    folder: str
    mode: ContinuationMode
    template_kwargs: dict[str, Any]
    break_mark: str
    """The SPELLING_BREAK of the process that gets the results."""


PromptFailure = Literal["template", "context_exceeded", "too_deep", "failed"]


class PromptResult(Struct):
    """A prompt, or why there is none."""

    failure: PromptFailure | None = None
    message: str = ""
    base: PromptPrefix | None = None
    ids: bytes = b""  # int32
    json: bytes = b""
    end: str = ""
    mark: ContextMark | None = None
    reason: BranchReason | None = None

    def to_prompt(self) -> RenderedPrompt:
        return RenderedPrompt(self.base, np.frombuffer(self.ids, np.int32), self.json, self.end, self.mark, self.reason)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the parent, and its end is ours
    os.nice(_NICENESS)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    frame = _read_frame(source)
    if frame is None:
        return
    setup = msgspec.json.decode(frame, type=WorkerSetup)
    model = ModelCodec.load(setup.folder, setup.mode, setup.template_kwargs)
    while (frame := _read_frame(source)) is not None:
        result = _run_job(model, frame, setup.break_mark)
        reply = msgspec.msgpack.encode(result)
        sink.write(len(reply).to_bytes(FRAME_LENGTH_BYTES, "little"))
        sink.write(reply)
        sink.flush()


def _read_frame(source: BinaryIO) -> bytes | None:
    """Reads a frame. Returns None at the end of the input."""
    head = source.read(FRAME_LENGTH_BYTES)
    if len(head) < FRAME_LENGTH_BYTES:
        return None
    size = int.from_bytes(head, "little")
    frame = source.read(size)
    return frame if len(frame) == size else None


def _run_job(model: ModelCodec, frame: bytes, break_mark: str) -> PromptResult:
    try:
        job: PromptJob = pickle.loads(frame)
        result = make_prompt(model, job.request, job.build_history(), job.partial_turns, job.context_length)
    except TemplateError as error:
        return PromptResult("template", str(error))
    except ContextExceeded as error:
        return PromptResult("context_exceeded", str(error))
    except RecursionError:
        return PromptResult("too_deep")
    except Exception as error:  # noqa: BLE001 (the parent raises it where it is logged)
        return PromptResult("failed", repr(error))
    end = result.prompt_end.replace(SPELLING_BREAK, break_mark)
    return PromptResult(None, "", result.base, result.ids.tobytes(), result.ids_json, end, result.mark, result.reason)


if __name__ == "__main__":
    main()
