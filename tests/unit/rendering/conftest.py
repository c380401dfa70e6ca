"""What the tests of rendering share."""

from collections.abc import Iterator
from functools import cache

import pytest

from polar.rendering import model_codec
from polar.rendering.encoder import PromptEncoder


@pytest.fixture(autouse=True, scope="session")
def _share_encoders() -> Iterator[None]:
    """One encoder a tokenizer, whatever the mode: for a vocabulary of 262,144 tokens it takes seconds to build."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(model_codec, "PromptEncoder", cache(PromptEncoder))
        yield
