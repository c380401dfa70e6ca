"""A Dockerfile as instructions: lines joined, comments gone, here-documents taken in."""

import re
from collections.abc import Iterator, Mapping

from msgspec import Struct

from polar.errors import ConfigError

_DIRECTIVE = re.compile(r"#\s*(\w+)\s*=\s*(\S+)\s*$")
_HERE_DOCUMENT = re.compile(r"""<<(-?)(["']?)([A-Za-z_][A-Za-z0-9_.]*)\2""")  # a whole word
_WITH_DOCUMENTS = ("RUN", "COPY", "ADD")
_VARIABLE = re.compile(r"\\(.)|\$(?:\{([A-Za-z_]\w*)(?:(:[-+])([^{}]*))?\}|([A-Za-z_]\w*))", re.DOTALL)
_WORD = re.compile(r"""(?:[^\s"'\\]|\\.|"(?:[^"\\]|\\.)*"|'[^']*')+""", re.DOTALL)
_QUOTES = re.compile(r"""\\(.)|"((?:[^"\\]|\\.)*)"|'([^']*)'|([^"'\\]+)""", re.DOTALL)


class HereDocument(Struct, frozen=True):
    """A here-document of an instruction."""

    name: str
    text: str
    expands_variables: bool  # variables in it are meant


class Instruction(Struct, frozen=True):
    line: int
    name: str  # in capitals
    flags: dict[str, list[str]]  # --name=value, each as often as it stands there
    rest: str
    documents: tuple[HereDocument, ...] = ()


class DockerfileError(ConfigError):
    """An instruction that can't be followed: `line 3: ADD: ...`."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(f"line {line}: {message}")


def parse_instructions(text: str) -> Iterator[Instruction]:
    lines = text.replace("\r\n", "\n").split("\n")
    number = 0
    for line in lines:
        if not (found := _DIRECTIVE.match(line.strip())):
            break
        if found[1].lower() == "escape" and found[2] != "\\":
            raise DockerfileError(1, "the escape character can't be changed")
    while number < len(lines):
        start, line = number + 1, lines[number]
        number += 1
        if _is_blank_or_comment(line):
            continue
        whole = ""
        while True:
            joined = line.rstrip()
            if not joined.endswith("\\"):
                whole += line
                break
            whole += joined[:-1]
            while number < len(lines) and _is_blank_or_comment(lines[number]):
                number += 1
            if number == len(lines):
                break
            line = lines[number]
            number += 1
        name, _, rest = re.sub(r"\s", " ", whole.strip(), count=1).partition(" ")
        name, rest = name.upper(), rest.strip()
        documents: list[HereDocument] = []
        if name in _WITH_DOCUMENTS:
            for word in _WORD.finditer(rest):
                if found := _HERE_DOCUMENT.fullmatch(word[0]):
                    document, number = _read_here_document(found, lines, number, start)
                    documents.append(document)
        flags, rest = _split_flags(rest)
        yield Instruction(start, name, flags, rest, tuple(documents))


def expand(text: str, variables: Mapping[str, str]) -> str:
    """`$NAME`, `${NAME}`, `${NAME:-else}` and `${NAME:+then}`, as an instruction other than RUN knows them."""

    def value(found: re.Match[str]) -> str:
        if found[1] is not None:
            return "$" if found[1] == "$" else found[0]
        known = variables.get(found[2] or found[5], "")
        if found[3] == ":-":
            return known or expand(found[4], variables)
        if found[3] == ":+":
            return expand(found[4], variables) if known else ""
        return known

    return _VARIABLE.sub(value, text)


def split_words(text: str, variables: Mapping[str, str]) -> list[str]:
    """Split at white space; variables put in and quotes taken off."""
    return [unquote(found[0], variables) for found in _WORD.finditer(text)]


def env_pairs(one: Instruction, variables: Mapping[str, str]) -> dict[str, str]:
    """What ENV sets: `name=value ...`, or the old `name value`."""
    if not one.rest:
        raise DockerfileError(one.line, "ENV: it takes NAME=VALUE")
    name, *value = one.rest.split(maxsplit=1)
    if "=" not in name and value:
        return {name: unquote(value[0], variables)}
    pairs = {}
    for word in split_words(one.rest, variables):
        name, given, text = word.partition("=")
        if not given or not name:
            raise DockerfileError(one.line, f"ENV: {word!r} has no value: write NAME=VALUE")
        pairs[name] = text
    return pairs


def unquote(word: str, variables: Mapping[str, str]) -> str:
    def inner(found: re.Match[str]) -> str:
        escaped, double, single, bare = found.groups()
        if escaped is not None:
            return str(escaped)
        if double is not None:
            return re.sub(r"\\([\\\"])", r"\1", expand(double, variables))
        return str(single) if single is not None else expand(bare, variables)

    return _QUOTES.sub(inner, word)


def here_document_name(word: str) -> str | None:
    """The name of the here-document that a word of COPY stands for."""
    found = _HERE_DOCUMENT.fullmatch(word)
    return found[3] if found else None


def _is_blank_or_comment(line: str) -> bool:
    return not line.strip() or line.lstrip().startswith("#")


def _read_here_document(found: re.Match[str], lines: list[str], number: int, start: int) -> tuple[HereDocument, int]:
    tabs, quote, name = found.groups()
    body: list[str] = []
    while number < len(lines):
        line = lines[number].lstrip("\t") if tabs else lines[number]
        number += 1
        if line == name:
            return HereDocument(name, "".join(f"{one}\n" for one in body), not quote), number
        body.append(line)
    raise DockerfileError(start, f"the here-document {name} has no end")


def _split_flags(rest: str) -> tuple[dict[str, list[str]], str]:
    flags: dict[str, list[str]] = {}
    while found := re.match(r"--([a-z-]+)(?:=(\S*))?(?:\s+|$)", rest):
        flags.setdefault(found[1], []).append(found[2] or "")
        rest = rest[found.end() :]
    return flags, rest
