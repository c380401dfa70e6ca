"""Makes the scripted engine's tokenizer: a small byte-level BPE over the sources of Python's standard library.

    python tools/make_tokenizer.py

It writes tokenizer.json and tokenizer_config.json into src/polar/engines/scripted/tokenizer. The same Python version
and the same version of `tokenizers` give the same files. The chat template beside them is written by hand.
"""

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

FOLDER = Path(__file__).parent.parent / "src" / "polar" / "engines" / "scripted" / "tokenizer"
VOCABULARY = 4096
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
PACKAGES = ("asyncio", "concurrent", "email", "http", "json", "logging", "pydoc_data", "unittest", "urllib")


def corpus() -> Iterator[str]:
    """Code, its comments, and the prose of the language reference."""
    library = Path(sysconfig.get_path("stdlib"))
    sources = sorted(library.glob("*.py"))
    for package in PACKAGES:
        sources += sorted((library / package).glob("*.py"))
    for source in sources:
        yield source.read_text(encoding="utf-8", errors="replace")


def train() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # every byte is a token: any text can be encoded
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    # Markup is matched as a whole, too, but is part of the text: whoever decodes a reply must see it.
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP])
    return tokenizer


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    train().save(str(FOLDER / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 131072,
        "clean_up_tokenization_spaces": False,
    }
    (FOLDER / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
