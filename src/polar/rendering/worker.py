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

from polar.rendering.continuation import BranchReason, Mode
from polar.rendering.encoder import BREAK
from polar.rendering.mark import ContextMark
from polar.rendering.model import Model
from polar.rendering.prompt_job import ContextExceeded, Prompt, PromptBase, PromptJob, make_prompt
from polar.rendering.template import TemplateError

LENGTH_BYTES = 8
_NICENESS = 5
"""Those who wait for a long text wait a little longer, and nobody else notices."""


class Setup(Struct):
    folder: str
    mode: Mode
    template_kwargs: dict[str, Any]
    break_mark: str
    """The mark within broken spellings (encoder.BREAK) of the process that gets the results."""


Failure = Literal["template", "context_exceeded", "too_deep", "failed"]


class Made(Struct):
    """A prompt, or why there is none."""

    failure: Failure | None = None
    message: str = ""
    base: PromptBase | None = None
    ids: bytes = b""  # int32
    json: bytes = b""
    end: str = ""
    mark: ContextMark | None = None
    reason: BranchReason | None = None

    def prompt(self) -> Prompt:
        return Prompt(self.base, np.frombuffer(self.ids, np.int32), self.json, self.end, self.mark, self.reason)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the parent, and its end is ours
    os.nice(_NICENESS)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    frame = _read(source)
    if frame is None:
        return
    setup = msgspec.json.decode(frame, type=Setup)
    model = Model.load(setup.folder, setup.mode, setup.template_kwargs)
    while (frame := _read(source)) is not None:
        made = _make(model, frame, setup.break_mark)
        reply = msgspec.msgpack.encode(made)
        sink.write(len(reply).to_bytes(LENGTH_BYTES, "little"))
        sink.write(reply)
        sink.flush()


def _read(source: BinaryIO) -> bytes | None:
    """None at the end."""
    head = source.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        return None
    size = int.from_bytes(head, "little")
    frame = source.read(size)
    return frame if len(frame) == size else None


def _make(model: Model, frame: bytes, break_mark: str) -> Made:
    try:
        job: PromptJob = pickle.loads(frame)
        made = make_prompt(model, job.request, job.history(), job.cuts, job.context_length)
    except TemplateError as error:
        return Made("template", str(error))
    except ContextExceeded as error:
        return Made("context_exceeded", str(error))
    except RecursionError:
        return Made("too_deep")
    except Exception as error:  # noqa: BLE001 (the parent raises it where it is logged)
        return Made("failed", repr(error))
    end = made.end.replace(BREAK, break_mark)
    return Made(None, "", made.base, made.ids.tobytes(), made.json, end, made.mark, made.reason)


if __name__ == "__main__":
    main()
