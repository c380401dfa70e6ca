"""A model that is small enough to be trained in a test, with the tokenizer of the scripted engine."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from polar.engines.scripted.server import TOKENIZER_FOLDER


def vocabulary() -> int:
    written = json.loads((TOKENIZER_FOLDER / "tokenizer.json").read_text())
    added = [token["id"] for token in written.get("added_tokens", [])]
    return max(*written["model"]["vocab"].values(), *added) + 1


def model(seed: int = 0, **changes: Any) -> Any:
    """A Llama with two layers and random weights."""
    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": vocabulary(),
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape | changes)).eval()


def folder(path: Path, **changes: Any) -> Path:
    model(**changes).save_pretrained(path)
    for file in TOKENIZER_FOLDER.iterdir():
        shutil.copyfile(file, path / file.name)
    return path


@contextmanager
def kept_in(kept: list[torch.Tensor]) -> Iterator[None]:
    """What is kept for the backward pass."""

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield
