"""A model's language part by itself, so that trainer and engine have the same weights under the same names.

    python examples/swe/text_only.py /models/Qwen3.5-4B /models/Qwen3.5-4B-text

Qwen3.5 is published with an encoder for pictures. Trainers that train text load the language part alone, whose tensors
have shorter names; an engine that serves the whole would refuse them.
"""

import argparse
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("output", type=Path)
    asked = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(asked.model, dtype="auto")
    model.save_pretrained(asked.output)
    AutoTokenizer.from_pretrained(asked.model).save_pretrained(asked.output)
    print(f"{type(model).__name__}, {model.num_parameters():,} parameters, in {asked.output}")


if __name__ == "__main__":
    main()
