"""Questions whose answers stand in a book that nobody has read: names and numbers are made up for each.

A question asks for the number of a name. In its book the name has it, or, in a chain of several `hops`, says which name
to see next:

    Milo: see Drenar
    Drenar: 4711

Other names stand there as well. No name is in two books, and no answer to train on is one of the held-out ones.
"""

import itertools
import random
from collections.abc import Iterator

from msgspec import Struct

RESERVED_NAMES = {"Anna", "Paul", "35", "3507"}
"""What the agent's own example says."""

_ONSETS = [*"bcdfghjklmnprstvwz", "br", "dr", "gl", "kr", "st", "tr"]
_VOWELS = [*"aeiou", "ai"]
_CODAS = ("", "l", "n", "r", "v", "m")
_MIDDLES = "bdlnvzm"
_ENDS = [*"lnrstxm", "nd", "rk"]
_DISTRACTOR_NAMES = 3  # names in a book besides those that a question needs
_HELD_OUT_MODULUS = 3  # of so many numbers, one is for held-out questions


class Question(Struct, frozen=True):
    name: str
    book: dict[str, str]
    answer: str

    @property
    def text(self) -> str:
        return f"Find the number of {self.name}."

    @property
    def book_text(self) -> str:
        return "".join(f"{name}: {said}\n" for name, said in self.book.items())


class Questions(Struct, frozen=True):
    train: list[Question]
    held_out: list[Question]


def make_questions(*, train: int, held_out: int, seed: int, hops: int = 1, digits: int = 2) -> Questions:
    """The same for the same seed."""
    rng = random.Random(f"{seed}/{hops}/{digits}")
    names = _generate_names(rng)

    def draw(count: int, *, kept_out: bool) -> list[Question]:
        return [_make_question(rng, names, _draw_number(rng, digits, kept_out), hops) for _ in range(count)]

    return Questions(draw(train, kept_out=False), draw(held_out, kept_out=True))


def _make_question(rng: random.Random, names: Iterator[str], answer: str, hops: int) -> Question:
    digits = len(answer)
    chain = [next(names) for _ in range(hops)]
    entries = [(name, f"see {other}") for name, other in itertools.pairwise(chain)]
    entries.append((chain[-1], answer))
    entries += [(next(names), str(rng.randrange(10 ** (digits - 1), 10**digits))) for _ in range(_DISTRACTOR_NAMES)]
    rng.shuffle(entries)
    return Question(chain[0], dict(entries), answer)


def _generate_names(rng: random.Random) -> Iterator[str]:
    seen = set(RESERVED_NAMES)
    while True:
        parts = (_ONSETS, _VOWELS, _CODAS, _MIDDLES, _VOWELS, _ENDS)
        name = "".join(rng.choice(part) for part in parts).capitalize()
        if name not in seen:
            seen.add(name)
            yield name


def _draw_number(rng: random.Random, digits: int, held_out: bool) -> str:
    while True:
        number = rng.randrange(10 ** (digits - 1), 10**digits)
        if (number % _HELD_OUT_MODULUS == 0) == held_out and str(number) not in RESERVED_NAMES:
            return str(number)
