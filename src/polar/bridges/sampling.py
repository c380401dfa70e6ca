"""A trainer's sampling, over whatever the harness and the task ask for."""

from typing import Any

from polar.config import SamplingOverrides

_TOP_K_WITHOUT_LIMIT = 10**8
"""What some trainers have for `top_k` where nobody says anything."""


def build_sampling_overrides(*, top_k: int | None = None, **others: Any) -> SamplingOverrides:
    """A `top_k` that leaves all tokens (-1, as vLLM has it, or more than there are) is our 0; None says nothing."""
    if top_k is not None:
        top_k = top_k if 0 < top_k < _TOP_K_WITHOUT_LIMIT else 0
    return SamplingOverrides(top_k=top_k, **others)
