"""What is kept of a prompt, so that later ones can go on from it."""

from msgspec import Struct


class ContextMark(Struct, frozen=True, array_like=True, gc=False):
    """What a later request needs to prove that it goes on from a prompt (continuation.py)."""

    context: str  # digest of the prompt's text (not the model's turns, nor the generation prompt) and the tokenizer
    length: int  # of that text, in characters
    turns: str  # digest of what the model's turns in it say
    opening: str  # the generation prompt
