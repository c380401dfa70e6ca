"""`python -m polar.models.conversion SOURCE FOLDER`: a GGUF file as a folder with plain weights and a tokenizer.

A process of its own, since whoever asks for the model need not have torch in its memory.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def convert(source: Path, folder: Path) -> None:
    transformers: Any = import_module("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name)
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # they are plain weights now
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


if __name__ == "__main__":
    convert(*map(Path, sys.argv[1:]))
