"""A process that makes prompts: `python -m polar.rendering.worker`, started and fed by worker_pool.py.

Rendering and encoding a long text keeps an interpreter busy for seconds. Here it is not the one that serves everybody.
Messages on standard input and output are frames: a length of eight bytes, then as many bytes.

    in: Setup (JSON), then PromptJobs (pickled)        out: a Made for each job (MessagePack)

Jobs are pickled since a request holds optional raw JSON (`Raw | None`), which msgspec writes and can't read. Only the
parent writes here, and nothing that comes back is unpickled.

It ends when its input ends, that is, with its parent, however that dies.
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
"""Those who wait for a long text wait a little longer, and nobody else notices."""


class WorkerSetup(Struct):
    folder: str
    mode: ContinuationMode
    template_kwargs: dict[str, Any]
    break_mark: str
    """The mark within broken spellings (encoder.BREAK) of the process that gets the results."""


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
        made = _run_job(model, frame, setup.break_mark)
        reply = msgspec.msgpack.encode(made)
        sink.write(len(reply).to_bytes(FRAME_LENGTH_BYTES, "little"))
        sink.write(reply)
        sink.flush()


def _read_frame(source: BinaryIO) -> bytes | None:
    """None at the end."""
    head = source.read(FRAME_LENGTH_BYTES)
    if len(head) < FRAME_LENGTH_BYTES:
        return None
    size = int.from_bytes(head, "little")
    frame = source.read(size)
    return frame if len(frame) == size else None


def _run_job(model: ModelCodec, frame: bytes, break_mark: str) -> PromptResult:
    try:
        job: PromptJob = pickle.loads(frame)
        made = make_prompt(model, job.request, job.build_history(), job.partial_turns, job.context_length)
    except TemplateError as error:
        return PromptResult("template", str(error))
    except ContextExceeded as error:
        return PromptResult("context_exceeded", str(error))
    except RecursionError:
        return PromptResult("too_deep")
    except Exception as error:  # noqa: BLE001 (the parent raises it where it is logged)
        return PromptResult("failed", repr(error))
    end = made.prompt_end.replace(SPELLING_BREAK, break_mark)
    return PromptResult(None, "", made.base, made.ids.tobytes(), made.ids_json, end, made.mark, made.reason)


if __name__ == "__main__":
    main()
