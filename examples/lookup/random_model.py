"""A model with random weights, of Llama-3.2-1B's shape or another, to measure what training costs.

    python examples/lookup/random_model.py FOLDER [--tokenizer MODEL] [--hidden 2048] [--layers 16] ...

It has the tokenizer and the chat template of another model's folder [default: the demo's].
"""

import argparse
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from polar.models import ensure_default_model, show_progress

TOKENIZER = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes a model with random weights.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, help="a model's folder [the demo's]")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=8192, help="width of the feed-forward parts")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--shared", type=int, default=8, help="heads of keys and values")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    wanted = parser.parse_args()
    source = wanted.tokenizer
    if source is None:
        with show_progress() as progress:
            source = ensure_default_model(progress)
    given = LlamaConfig.from_pretrained(source, local_files_only=True)
    config = LlamaConfig(
        vocab_size=given.vocab_size,
        bos_token_id=given.bos_token_id,
        eos_token_id=given.eos_token_id,
        hidden_size=wanted.hidden,
        intermediate_size=wanted.inner,
        num_hidden_layers=wanted.layers,
        num_attention_heads=wanted.heads,
        num_key_value_heads=wanted.shared,
        max_position_embeddings=given.max_position_embeddings,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device(wanted.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(wanted.folder)
    for name in TOKENIZER:
        if (source / name).exists():
            shutil.copy(source / name, wanted.folder / name)
    print(f"{wanted.folder}: {model.num_parameters() / 1e9:.2f} billion parameters")


if __name__ == "__main__":
    main()
