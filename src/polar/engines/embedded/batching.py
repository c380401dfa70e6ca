"""The model at work, in a thread of its own: requests come and go between its passes (continuous batching).

A pass takes the next token of every sequence that is being sampled, and as much of new prompts as fits. What it samples
is handed on with the version of the weights that computed that very pass.
"""

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from msgspec import Struct
from torch.nn.attention import SDPBackend, sdpa_kernel

from polar.engines.embedded import attention
from polar.engines.embedded.choosing import Row, choose
from polar.engines.embedded.generation import Token
from polar.engines.embedded.options import Options
from polar.engines.embedded.slots import Slot, Slots
from polar.errors import EngineError

log = logging.getLogger(__name__)

_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Of attention: not cuDNN's, which takes 0.1 s for a plan whenever a length is new, and here every pass has one."""
_ROOM = {"cpu": 1024, "cuda": 4096}
"""Tokens of a pass, where nobody says: a GPU takes as long for few as for many."""

Deliver = Callable[[list[tuple[str, Token]]], None]
"""Told of the tokens of one pass, by request; called in the model's thread."""
Broken = Callable[[str], None]
"""Told why nothing is sampled any more; called in the model's thread."""


class _Sequence(Struct, eq=False):
    name: str
    ids: list[int]  # prompt and sampled tokens
    left: int  # tokens that it may still have
    ends: frozenset[int]
    row: Row
    slot: Slot | None = None  # none while it waits


class _Part(Struct):
    """What a pass computes of a sequence: its ids `start` to `stop` (exclusive)."""

    sequence: _Sequence
    slot: Slot
    start: int
    stop: int

    @property
    def samples(self) -> bool:
        return self.stop == len(self.sequence.ids)


class Batching:
    def __init__(self, model: Any, slots: Slots, options: Options, deliver: Deliver, broken: Broken) -> None:
        self.version = 0
        self.computed = 0  # tokens that went through the model
        self._model = model
        self._slots = slots
        self._room = options.max_batch_tokens or _ROOM.get(model.device.type, _ROOM["cpu"])
        self._deliver = deliver
        self._broken = broken
        self._numbers = itertools.count()
        self._news: deque[_Sequence | str] = deque()  # requests that came, and names of those that went
        self._sequences: dict[str, _Sequence] = {}  # the model's thread's own, in the order in which they came
        self._wanted = threading.Event()  # there may be something to do
        self._paused = self._stopped = False
        self._holders = 0  # that want it to stand still, or have it so
        self._turn = threading.Lock()  # held during each pass
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    # Requests: on the event loop, which never waits for a pass

    def add(self, context: list[int], max_tokens: int, ends: Iterable[int], row: Row) -> str:
        """Begins to sample behind these ids. Raises EngineError where the model's thread has ended."""
        if not self._thread.is_alive():
            raise EngineError("The model's thread has ended.")
        name = str(next(self._numbers))
        self._news.append(_Sequence(name, list(context), max_tokens, frozenset(ends), row))
        self._wanted.set()
        return name

    def drop(self, name: str) -> None:
        """Its place is free for another one; nothing more comes of it."""
        self._news.append(name)
        self._wanted.set()

    # Standing still: off the event loop, since the pass that runs is waited for

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """No pass of the model runs meanwhile. One at a time."""
        self._holders += 1
        try:
            with self._turn:
                yield
        finally:
            self._holders -= 1
            self._wanted.set()

    def pause(self) -> None:
        self._paused = True
        with self._turn:
            pass

    def resume(self) -> None:
        self._paused = False
        self._wanted.set()

    def forget(self) -> None:
        """All requests, and all keys and values; while it stands still."""
        for sequence in self._sequences.values():
            self._let_go(sequence)
        self._sequences.clear()
        self._slots.forget()

    def stop(self) -> None:
        self._stopped = True
        self._wanted.set()
        self._thread.join()

    # In the model's thread

    @torch.inference_mode()
    def _run(self) -> None:
        try:
            while not self._stopped:
                self._wanted.wait()
                self._wanted.clear()
                while self._step():
                    pass
        except Exception as error:  # whatever it is, somebody must hear of it
            log.exception("The model broke.")
            self._broken(f"{type(error).__name__}: {error}")

    def _step(self) -> bool:
        """One pass; False where there is nothing to do, or nothing may be done."""
        with self._turn:
            self._hear()
            if self._paused or self._stopped or self._holders:
                return False
            parts = self._parts()
            if not parts:
                return False
            logits = self._pass(parts)
            sampling = [part.sequence for part in parts if part.samples]
            for part in parts:
                part.slot.extend(part.sequence.ids[part.start : part.stop])
            if sampling:
                tokens = choose(logits, [sequence.row for sequence in sampling], self.version)
                self._deliver([(it.name, token) for it, token in zip(sampling, tokens, strict=True)])
                for sequence, token in zip(sampling, tokens, strict=True):
                    self._go_on(sequence, token)
            return True

    def _hear(self) -> None:
        while self._news:
            news = self._news.popleft()
            if isinstance(news, _Sequence):
                self._sequences[news.name] = news
            elif (sequence := self._sequences.pop(news, None)) is not None:
                self._let_go(sequence)

    def _let_go(self, sequence: _Sequence) -> None:
        if sequence.slot is not None:
            self._slots.give_back(sequence.slot)

    def _go_on(self, sequence: _Sequence, token: Token) -> None:
        sequence.ids.append(token.id)
        sequence.left -= 1
        if token.id in sequence.ends or not sequence.left:
            del self._sequences[sequence.name]
            self._let_go(sequence)

    def _parts(self) -> list[_Part]:
        """Those that have one token left to compute come first: all of them are in every pass."""
        single: list[_Part] = []
        longer: list[_Part] = []
        for sequence in self._sequences.values():
            if sequence.slot is None and self._slots.free:
                sequence.slot = self._slots.take(np.asarray(sequence.ids, np.int32))
            if (slot := sequence.slot) is not None:
                part = _Part(sequence, slot, len(slot.ids), len(sequence.ids))
                (single if part.stop - part.start == 1 else longer).append(part)
        room = max(self._room - len(single), 1)
        pieces: list[_Part] = []
        for part in longer:
            if room > 0:
                part.stop = min(part.stop, part.start + room)
                room -= part.stop - part.start
                pieces.append(part)
        return single + sorted(pieces, key=lambda part: part.stop - part.start)

    def _pass(self, parts: list[_Part]) -> torch.Tensor:
        """The logits behind each part that samples: [parts, vocabulary]."""
        device = self._model.device
        plan = attention.plan(
            self._slots,
            [attention.Part(part.slot.place, part.start, part.stop) for part in parts],
            device,
            alone=device.type == "cpu",  # there a copy costs more than a call
        )
        ids = [id for part in parts for id in part.sequence.ids[part.start : part.stop]]
        ends = itertools.accumulate(part.stop - part.start for part in parts)
        keep = [end - 1 for part, end in zip(parts, ends, strict=True) if part.samples]
        with sdpa_kernel(_KERNELS):
            out = self._model(
                input_ids=torch.tensor([ids], device=device),
                position_ids=plan.position[None],
                logits_to_keep=torch.tensor(keep, device=device, dtype=torch.long) if keep else 1,
                use_cache=False,
                plan=plan,
            )
        self.computed += len(ids)
        logits: torch.Tensor = out.logits[0]
        return logits
