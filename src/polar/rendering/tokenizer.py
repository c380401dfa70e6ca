"""A model's tokenizer, read from its folder: `tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja`.

Text that is encoded turn by turn must give the ids of the text encoded whole. For tokenizers where it does (probed when
the folder is read), `encode_turns` remembers the ids of each turn, so that a conversation costs only what is new in it.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

import msgspec
import numpy as np
import tokenizers
from msgspec import Struct

from polar.errors import ConfigError
from polar.records.exchange import TokenIds
from polar.rendering.template import ChatTemplate, TemplateError

_TURNS_REMEMBERED = 8192
_REPLACEMENT = "�"  # the decoding of undecodable bytes, such as half a character


class _AddedToken(Struct):
    content: str


class _NamedTemplate(Struct):
    name: str
    template: str


class _Config(Struct):
    """The fields of tokenizer_config.json that are used."""

    bos_token: str | _AddedToken | None = None
    eos_token: str | _AddedToken | None = None
    unk_token: str | _AddedToken | None = None
    sep_token: str | _AddedToken | None = None
    pad_token: str | _AddedToken | None = None
    cls_token: str | _AddedToken | None = None
    mask_token: str | _AddedToken | None = None
    chat_template: str | list[_NamedTemplate] | None = None

    def collect_special_tokens(self) -> dict[str, str]:
        tokens = {name: getattr(self, name) for name in self.__struct_fields__ if name.endswith("_token")}
        return {
            name: token.content if isinstance(token, _AddedToken) else token
            for name, token in tokens.items()
            if token is not None
        }


def encode_ids(backend: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool = False) -> list[int]:
    """Encodes a text as a batch of one: only for batches does the library release the interpreter's lock."""
    ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    return ids


class Tokenizer:
    """Encodes and decodes as the model's own tokenizer does. Safe to use from several threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: dict[str, str],
        template: ChatTemplate | None,
        folder: str = "The tokenizer",
    ) -> None:
        self._folder = folder
        self.backend = backend
        self._template = template
        self.special_tokens = special_tokens
        """The special tokens' texts by their names: `eos_token`, `bos_token`, ..."""
        self.added_tokens = {token.content: id for id, token in backend.get_added_tokens_decoder().items()}
        """The ids of all tokens that are matched before the text is split: control tokens and markup."""
        self.eos_id = self.added_tokens.get(special_tokens.get("eos_token", ""))
        self.vocabulary_size: int = backend.get_vocab_size(with_added_tokens=True)
        self._turn_end = self._find_turn_end()
        self._encode_turn = lru_cache(maxsize=_TURNS_REMEMBERED)(self._encode_array)
        self._token_texts: list[str | None] = [None] * self.vocabulary_size

    @classmethod
    def load(cls, folder: str | Path) -> "Tokenizer":
        folder = Path(folder)
        try:
            backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises nothing more precise
            raise ConfigError(f"There is no readable tokenizer.json in {folder}: {error}.") from error
        config = _Config()
        if (path := folder / "tokenizer_config.json").exists():
            try:
                config = msgspec.json.decode(path.read_bytes(), type=_Config)
            except msgspec.DecodeError as error:
                raise ConfigError(f"{path} can't be read: {error}.") from error
        special = config.collect_special_tokens()
        source: str | dict[str, str] | None
        if (path := folder / "chat_template.jinja").exists():
            source = path.read_text(encoding="utf-8")
        elif isinstance(config.chat_template, list):
            source = {named.name: named.template for named in config.chat_template}
        else:
            source = config.chat_template
        try:
            return cls(backend, special, None if source is None else ChatTemplate(source, special), str(folder))
        except TemplateError as error:
            raise ConfigError(f"{folder}: {error}") from error

    @property
    def template(self) -> ChatTemplate:
        if self._template is None:
            raise ConfigError(
                f"{self._folder} has no chat template: neither chat_template.jinja, nor chat_template in "
                f"tokenizer_config.json."
            )
        return self._template

    @property
    def template_source(self) -> str:
        """The sources of all templates; empty if there is none."""
        return "" if self._template is None else self._template.all_sources

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return encode_ids(self.backend, text, add_special_tokens=add_special_tokens)

    def encode_words(self, text: str) -> tuple[list[int], list[int | None]]:
        """Encodes a text. Returns the ids, and for each id the number of its word."""
        encoding = self.backend.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.word_ids

    def encode_turns(self, text: str) -> TokenIds:
        """Encodes a rendered conversation to the same ids as `encode` does, with a cache of its turns."""
        if self._turn_end is None:
            return self._encode_turn(text)
        *turns, open_turn = text.split(self._turn_end)
        closed_ids = [self._encode_turn(turn + self._turn_end) for turn in turns]
        return np.concatenate([*closed_ids, self._encode_turn(open_turn)])

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def decode_token(self, id: int) -> str:
        """Decodes one token by itself. Part of a character becomes the replacement character."""
        if not 0 <= id < self.vocabulary_size:
            return ""
        text = self._token_texts[id]
        if text is None:
            text = self._token_texts[id] = self.decode([id])
        return text

    def id_to_token(self, id: int) -> str | None:
        """Returns the vocabulary's entry, which in byte-level tokenizers has one character for each byte."""
        return self.backend.id_to_token(id)

    def token_to_id(self, token: str) -> int | None:
        return self.backend.token_to_id(token)

    def make_detokenizer(self) -> "Detokenizer":
        return Detokenizer(self)

    def _encode_array(self, text: str) -> TokenIds:
        ids = np.asarray(self.encode(text), dtype=np.int32)
        ids.flags.writeable = False  # the cache shares it
        return ids

    def _find_turn_end(self) -> str | None:
        """Returns the end-of-turn token, or None if splitting the text behind it would change ids."""
        if self.eos_id is None:
            return None
        eos = self.special_tokens["eos_token"]
        for before, after in (("Yes.", "\nNo"), (" a", " b"), ("", "x"), ("\n", "\n\n"), ("é", "  1")):
            if self.encode(before + eos + after) != self.encode(before + eos) + self.encode(after):
                return None
        return eos


class Detokenizer:
    """Decodes a growing sequence of ids. Text is never taken back: a token that ends within a character is held until
    the character is complete."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode
        # A token's text can depend on the ones before it (leading spaces), so it is decoded together with the tokens
        # that were given out last.
        self._window: list[int] = []
        self._emitted_tokens = 0  # of the window
        self._emitted_text = ""

    def add(self, id: int) -> str:
        self._window.append(id)
        text = self._decode(self._window)
        if text.endswith(_REPLACEMENT):
            return ""
        return self._emit(text)

    def flush(self) -> str:
        """Returns the text that is still held, even if it ends within a character."""
        return self._emit(self._decode(self._window))

    def _emit(self, text: str) -> str:
        new_text = text[len(self._emitted_text) :]
        del self._window[: self._emitted_tokens]
        self._emitted_tokens = len(self._window)
        self._emitted_text = self._decode(self._window)
        return new_text


def decode_pieces(tokenizer: Tokenizer, ids: Iterable[int]) -> list[str]:
    """Returns the text that each id adds; joined, the pieces are the decoded text."""
    detokenizer = tokenizer.make_detokenizer()
    pieces = [detokenizer.add(id) for id in ids]
    if pieces:
        pieces[-1] += detokenizer.flush()
    return pieces


@lru_cache(8)
def load_tokenizer(folder: Path) -> Tokenizer:
    """Loads the tokenizer of a folder. It is cached: reading takes up to a second, and the folder never changes."""
    return Tokenizer.load(folder)
