"""Sampled ids to reasoning, text and tool calls, by model family."""

from polar.rendering.families.base import Family, FamilySigns, ReplyParser
from polar.rendering.families.element_calls import Glm, QwenCoder
from polar.rendering.families.harmony import Harmony
from polar.rendering.families.json_calls import DeepSeek, Hermes, Kimi, Llama, Mistral
from polar.rendering.families.markup import Generic, MarkupFamily
from polar.rendering.tokenizer import Tokenizer

FAMILIES: tuple[type[MarkupFamily] | type[Harmony], ...] = (
    Harmony,
    Kimi,
    DeepSeek,
    Glm,
    QwenCoder,
    Mistral,
    Hermes,
    Llama,
    Generic,
)
"""In order of detection: the more particular first, the generic one last."""


def detect_family(tokenizer: Tokenizer) -> Family:
    """The first family whose signs the tokenizer and its chat template show."""
    signs = FamilySigns(tokenizer)
    return next(family for family in FAMILIES if family.matches(signs))(tokenizer)


FallbackFamily = Hermes
"""The markup in which tools are told to a model whose template knows none (messages.py)."""

__all__ = ["FAMILIES", "FallbackFamily", "Family", "ReplyParser", "detect_family"]
