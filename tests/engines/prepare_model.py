"""SmolLM2-135M-Instruct as a folder that vLLM serves, made as Polar's default model is.

Runs in the engine's own environment (torch, transformers, gguf): python prepare_model.py FOLDER
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))  # Polar is not installed there

from polar.models.conversion import convert
from polar.models.default import SilentProgress, fetch_weights


def main(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        convert(fetch_weights(Path(scratch), SilentProgress()), folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
