"""Parses prompt ids from an engine's JSON, reading only the new ones.

An engine that is asked for token ids repeats those of the whole prompt with every reply: tens of thousands of numbers,
most of them the same as last time. So the text is compared with that of the session's last prompt (or, for its first,
with the last prompt of any session, which mostly has the same system prompt), and only what follows is parsed.
"""

from array import array

import msgspec
import numpy as np
from msgspec import Struct

from polar.records.exchange import TokenIds
from polar.store.sized_cache import SizedCache

_ids_decoder = msgspec.json.Decoder(list[int])
_COMMA = ord(",")


class _ParsedPrompt(Struct, frozen=True):
    text: bytes  # without the closing bracket
    ids: TokenIds


class PromptIdParser:
    def __init__(self, max_bytes: int = 32 * 1024 * 1024) -> None:
        self._prompt_by_session: SizedCache[str, _ParsedPrompt] = SizedCache(max_bytes)
        self._last: _ParsedPrompt | None = None

    def parse(self, session_id: str, text: bytes) -> TokenIds:
        """Parses `text`, a JSON list of numbers. Raises ValueError or OverflowError for anything else."""
        previous = self._prompt_by_session.get(session_id) or self._last
        ids = _parse(text) if previous is None else _extend(previous, text)
        self._last = prompt = _ParsedPrompt(text[:-1], ids)
        self._prompt_by_session.put(session_id, prompt, len(text) + ids.nbytes)
        return ids

    @property
    def memory_bytes(self) -> int:
        """Memory held for the next prompts of open sessions."""
        return self._prompt_by_session.size

    def forget(self, session_id: str) -> None:
        """Drops what is kept of a session that has ended."""
        self._prompt_by_session.drop(session_id)


def _parse(text: bytes) -> TokenIds:
    return np.frombuffer(array("i", _ids_decoder.decode(text)), dtype=np.int32)


def _extend(previous: _ParsedPrompt, text: bytes) -> TokenIds:
    """Parses what `text` has beyond the previous prompt."""
    end = len(previous.text)
    if text.startswith(previous.text) and text[end : end + 1] == b"," and end > 1:  # the usual case
        return np.concatenate([previous.ids, _parse(b"[" + text[end + 1 :])])
    length = min(end, len(text))
    differ = np.frombuffer(previous.text, np.uint8, length) != np.frombuffer(text, np.uint8, length)
    shared = int(differ.argmax()) if differ.any() else length
    cut = text.rfind(b",", 0, shared)  # the number behind it may differ in its later digits
    if cut < 0:
        return _parse(text)
    count = np.count_nonzero(np.frombuffer(text, np.uint8, cut) == _COMMA) + 1
    return np.concatenate([previous.ids[:count], _parse(b"[" + text[cut + 1 :])])
