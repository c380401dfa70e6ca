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

from polar.engines.api_server.backend import SampledToken
from polar.engines.embedded import attention
from polar.engines.embedded.kv_cache import CacheSlot, KVCache
from polar.engines.embedded.options import EmbeddedOptions
from polar.engines.embedded.sampler import SamplingState, sample_tokens
from polar.errors import EngineError

log = logging.getLogger(__name__)

_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Of attention: not cuDNN's, which takes 0.1 s for a plan whenever a length is new, and here every pass has one."""
_DEFAULT_BATCH_TOKENS = {"cpu": 1024, "cuda": 4096}
"""Tokens of a pass, where nobody says: a GPU takes as long for few as for many."""

OnTokens = Callable[[list[tuple[str, SampledToken]]], None]
"""Called in the model's thread with the tokens of one pass, by request."""
OnFailure = Callable[[str], None]
"""Called in the model's thread with the reason why nothing is sampled any more."""


class _Sequence(Struct, eq=False):
    name: str
    ids: list[int]  # prompt and sampled tokens
    remaining_tokens: int  # tokens that it may still have
    end_ids: frozenset[int]
    sampling_state: SamplingState
    slot: CacheSlot | None = None  # none while it waits


class _SequencePart(Struct):
    """What a pass computes of a sequence: its ids `start` to `stop` (exclusive)."""

    sequence: _Sequence
    slot: CacheSlot
    start: int
    stop: int

    @property
    def yields_token(self) -> bool:
        return self.stop == len(self.sequence.ids)


class Batcher:
    def __init__(
        self, model: Any, slots: KVCache, options: EmbeddedOptions, on_tokens: OnTokens, on_failure: OnFailure
    ) -> None:
        self.version = 0
        self.computed_tokens = 0  # tokens that went through the model
        self._model = model
        self._slots = slots
        self._max_batch_tokens = options.max_batch_tokens or _DEFAULT_BATCH_TOKENS.get(
            model.device.type, _DEFAULT_BATCH_TOKENS["cpu"]
        )
        self._on_tokens = on_tokens
        self._on_failure = on_failure
        self._numbers = itertools.count()
        self._inbox: deque[_Sequence | str] = deque()  # requests that came, and names of those that went
        self._sequences: dict[str, _Sequence] = {}  # the model's thread's own, in the order in which they came
        self._wakeup = threading.Event()  # there may be something to do
        self._paused = self._stopped = False
        self._hold_count = 0  # that want it to stand still, or have it so
        self._pass_lock = threading.Lock()  # held during each pass
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    # Requests: on the event loop, which never waits for a pass

    def add(self, context: list[int], max_tokens: int, end_ids: Iterable[int], sampling_state: SamplingState) -> str:
        """Begins to sample behind these ids. Raises EngineError where the model's thread has ended."""
        if not self._thread.is_alive():
            raise EngineError("The model's thread has ended.")
        name = str(next(self._numbers))
        self._inbox.append(_Sequence(name, list(context), max_tokens, frozenset(end_ids), sampling_state))
        self._wakeup.set()
        return name

    def drop(self, name: str) -> None:
        """Ends a request: its slot is free for another one."""
        self._inbox.append(name)
        self._wakeup.set()

    # Pausing: off the event loop, since it waits for the running pass

    @contextmanager
    def hold_still(self) -> Iterator[None]:
        """No pass of the model runs meanwhile. One at a time."""
        self._hold_count += 1
        try:
            with self._pass_lock:
                yield
        finally:
            self._hold_count -= 1
            self._wakeup.set()

    def pause(self) -> None:
        self._paused = True
        with self._pass_lock:
            pass

    def resume(self) -> None:
        self._paused = False
        self._wakeup.set()

    def clear(self) -> None:
        """All requests, and all keys and values; while it stands still."""
        for sequence in self._sequences.values():
            self._release_slot(sequence)
        self._sequences.clear()
        self._slots.clear()

    def stop(self) -> None:
        self._stopped = True
        self._wakeup.set()
        self._thread.join()

    # In the model's thread

    @torch.inference_mode()
    def _run(self) -> None:
        try:
            while not self._stopped:
                self._wakeup.wait()
                self._wakeup.clear()
                while self._step():
                    pass
        except Exception as error:  # whatever it is, somebody must hear of it
            log.exception("The model broke.")
            self._on_failure(f"{type(error).__name__}: {error}")

    def _step(self) -> bool:
        """One pass; False where there is nothing to do, or nothing may be done."""
        with self._pass_lock:
            self._drain_inbox()
            if self._paused or self._stopped or self._hold_count:
                return False
            parts = self._select_parts()
            if not parts:
                return False
            logits = self._forward(parts)
            sampling = [part.sequence for part in parts if part.yields_token]
            for part in parts:
                part.slot.extend(part.sequence.ids[part.start : part.stop])
            if sampling:
                tokens = sample_tokens(logits, [sequence.sampling_state for sequence in sampling], self.version)
                self._on_tokens([(it.name, token) for it, token in zip(sampling, tokens, strict=True)])
                for sequence, token in zip(sampling, tokens, strict=True):
                    self._advance(sequence, token)
            return True

    def _drain_inbox(self) -> None:
        while self._inbox:
            news = self._inbox.popleft()
            if isinstance(news, _Sequence):
                self._sequences[news.name] = news
            elif (sequence := self._sequences.pop(news, None)) is not None:
                self._release_slot(sequence)

    def _release_slot(self, sequence: _Sequence) -> None:
        if sequence.slot is not None:
            self._slots.release_slot(sequence.slot)

    def _advance(self, sequence: _Sequence, token: SampledToken) -> None:
        sequence.ids.append(token.id)
        sequence.remaining_tokens -= 1
        if token.id in sequence.end_ids or not sequence.remaining_tokens:
            del self._sequences[sequence.name]
            self._release_slot(sequence)

    def _select_parts(self) -> list[_SequencePart]:
        """Those that have one token left to compute come first: all of them are in every pass."""
        single: list[_SequencePart] = []
        longer: list[_SequencePart] = []
        for sequence in self._sequences.values():
            if sequence.slot is None and self._slots.has_free_slot:
                sequence.slot = self._slots.acquire_slot(np.asarray(sequence.ids, np.int32))
            if (slot := sequence.slot) is not None:
                part = _SequencePart(sequence, slot, len(slot.ids), len(sequence.ids))
                (single if part.stop - part.start == 1 else longer).append(part)
        room = max(self._max_batch_tokens - len(single), 1)
        pieces: list[_SequencePart] = []
        for part in longer:
            if room > 0:
                part.stop = min(part.stop, part.start + room)
                room -= part.stop - part.start
                pieces.append(part)
        return single + sorted(pieces, key=lambda part: part.stop - part.start)

    def _forward(self, parts: list[_SequencePart]) -> torch.Tensor:
        """The logits behind each part that samples: [parts, vocabulary]."""
        device = self._model.device
        plan = attention.build_plan(
            self._slots,
            [attention.SlotPart(part.slot.index, part.start, part.stop) for part in parts],
            device,
            separate=device.type == "cpu",  # there a copy costs more than a call
        )
        ids = [id for part in parts for id in part.sequence.ids[part.start : part.stop]]
        ends = itertools.accumulate(part.stop - part.start for part in parts)
        keep = [end - 1 for part, end in zip(parts, ends, strict=True) if part.yields_token]
        with sdpa_kernel(_KERNELS):
            out = self._model(
                input_ids=torch.tensor([ids], device=device),
                position_ids=plan.positions[None],
                logits_to_keep=torch.tensor(keep, device=device, dtype=torch.long) if keep else 1,
                use_cache=False,
                plan=plan,
            )
        self.computed_tokens += len(ids)
        logits: torch.Tensor = out.logits[0]
        return logits
