"""Translates a Dockerfile into a task's steps, for runtimes that build no images.

The base image is ignored: the steps run over the runtime's root. Instructions whose effect would silently differ
(several stages, downloads, other users) are errors.
"""

import json
import os
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from polar.errors import ConfigError

_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_DEFAULT_SHELL = ["/bin/sh", "-c"]
_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
_STANDARD_FOLDERS = ("/", "/bin", "/etc", "/home", "/opt", "/root", "/srv", "/tmp", "/usr", "/usr/bin", "/usr/local")
_MORE_STANDARD_FOLDERS = ("/usr/local/bin", "/usr/local/lib", "/usr/local/share", "/var", "/var/lib", "/var/log")
_IGNORED_INSTRUCTIONS = (
    "CMD",
    "ENTRYPOINT",
    "EXPOSE",
    "LABEL",
    "MAINTAINER",
    "HEALTHCHECK",
    "STOPSIGNAL",
    "VOLUME",
    "ONBUILD",
)
_ROOT_USERS = ("root", "0", "root:root", "0:0", "root:0", "0:root")
_DIRECTIVE = re.compile(r"#\s*(\w+)\s*=\s*(\S+)\s*$")
_HERE_DOCUMENT = re.compile(r"""<<(-?)(["']?)([A-Za-z_][A-Za-z0-9_.]*)\2""")  # a whole word
_WITH_DOCUMENTS = ("RUN", "COPY", "ADD")
_VARIABLE = re.compile(r"\\(.)|\$(?:\{([A-Za-z_]\w*)(?:(:[-+])([^{}]*))?\}|([A-Za-z_]\w*))", re.DOTALL)
_WORD = re.compile(r"""(?:[^\s"'\\]|\\.|"(?:[^"\\]|\\.)*"|'[^']*')+""", re.DOTALL)
_QUOTES = re.compile(r"""\\(.)|"((?:[^"\\]|\\.)*)"|'([^']*)'|([^"'\\]+)""", re.DOTALL)


# Instructions: lines are joined, comments removed, here-documents included.


class HereDocument(Struct, frozen=True):
    """A here-document of an instruction."""

    name: str
    text: str
    expands_variables: bool  # its name is not quoted


class Instruction(Struct, frozen=True):
    line: int
    name: str  # in capitals
    flags: dict[str, list[str]]  # --name=value, repeated flags in order
    rest: str
    documents: tuple[HereDocument, ...] = ()


class DockerfileError(ConfigError):
    """An instruction that is not supported: `line 3: ADD: ...`."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(f"line {line}: {message}")


def parse_instructions(text: str) -> Iterator[Instruction]:
    lines = text.replace("\r\n", "\n").split("\n")
    number = 0
    for line in lines:
        if not (match := _DIRECTIVE.match(line.strip())):
            break
        if match[1].lower() == "escape" and match[2] != "\\":
            raise DockerfileError(1, "the escape character can't be changed")
    while number < len(lines):
        start, line = number + 1, lines[number]
        number += 1
        if _is_blank_or_comment(line):
            continue
        joined_text = ""
        while True:
            joined = line.rstrip()
            if not joined.endswith("\\"):
                joined_text += line
                break
            joined_text += joined[:-1]
            while number < len(lines) and _is_blank_or_comment(lines[number]):
                number += 1
            if number == len(lines):
                break
            line = lines[number]
            number += 1
        name, _, rest = re.sub(r"\s", " ", joined_text.strip(), count=1).partition(" ")
        name, rest = name.upper(), rest.strip()
        documents: list[HereDocument] = []
        if name in _WITH_DOCUMENTS:
            for word in _WORD.finditer(rest):
                if match := _HERE_DOCUMENT.fullmatch(word[0]):
                    document, number = _read_here_document(match, lines, number, start)
                    documents.append(document)
        flags, rest = _split_flags(rest)
        yield Instruction(start, name, flags, rest, tuple(documents))


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Expands `$NAME`, `${NAME}`, `${NAME:-else}` and `${NAME:+then}`, as in every instruction but RUN."""

    def substitute(match: re.Match[str]) -> str:
        if match[1] is not None:
            return "$" if match[1] == "$" else match[0]
        known = variables.get(match[2] or match[5], "")
        if match[3] == ":-":
            return known or expand(match[4], variables)
        if match[3] == ":+":
            return expand(match[4], variables) if known else ""
        return known

    return _VARIABLE.sub(substitute, text)


def split_words(text: str, variables: Mapping[str, str]) -> list[str]:
    """Splits at white space, expands variables and removes quotes."""
    return [unquote(match[0], variables) for match in _WORD.finditer(text)]


def parse_env_pairs(instruction: Instruction, variables: Mapping[str, str]) -> dict[str, str]:
    """Parses ENV: `name=value ...`, or the old form `name value`."""
    if not instruction.rest:
        raise DockerfileError(instruction.line, "ENV: it takes NAME=VALUE")
    name, *value = instruction.rest.split(maxsplit=1)
    if "=" not in name and value:
        return {name: unquote(value[0], variables)}
    pairs = {}
    for word in split_words(instruction.rest, variables):
        name, separator, text = word.partition("=")
        if not separator or not name:
            raise DockerfileError(instruction.line, f"ENV: {word!r} has no value: write NAME=VALUE")
        pairs[name] = text
    return pairs


def unquote(word: str, variables: Mapping[str, str]) -> str:
    def replace(match: re.Match[str]) -> str:
        escaped, double, single, bare = match.groups()
        if escaped is not None:
            return str(escaped)
        if double is not None:
            return re.sub(r"\\([\\\"])", r"\1", expand(double, variables))
        return str(single) if single is not None else expand(bare, variables)

    return _QUOTES.sub(replace, word)


def find_here_document_name(word: str) -> str | None:
    """The name of the here-document that a word of COPY refers to."""
    match = _HERE_DOCUMENT.fullmatch(word)
    return match[3] if match else None


def _is_blank_or_comment(line: str) -> bool:
    return not line.strip() or line.lstrip().startswith("#")


def _read_here_document(match: re.Match[str], lines: list[str], number: int, start: int) -> tuple[HereDocument, int]:
    tabs, quote, name = match.groups()
    body: list[str] = []
    while number < len(lines):
        line = lines[number].lstrip("\t") if tabs else lines[number]
        number += 1
        if line == name:
            return HereDocument(name, "".join(f"{body_line}\n" for body_line in body), not quote), number
        body.append(line)
    raise DockerfileError(start, f"the here-document {name} has no end")


def _split_flags(rest: str) -> tuple[dict[str, list[str]], str]:
    flags: dict[str, list[str]] = {}
    while match := re.match(r"--([a-z-]+)(?:=(\S*))?(?:\s+|$)", rest):
        flags.setdefault(match[1], []).append(match[2] or "")
        rest = rest[match.end() :]
    return flags, rest


class DockerfileSteps:
    """The steps, variables and workdir of a Dockerfile. Raises DockerfileError, a ConfigError that begins with the
    line."""

    def __init__(self, text: str, context: Path, timeout: float) -> None:
        """`context` is the folder from which COPY reads."""
        self.base = ""
        self.steps: list[dict[str, Any]] = []
        self.env: dict[str, str] = {}
        self.workdir: str | None = None
        self._arguments: dict[str, str] = {}
        self._context = context
        self._timeout = timeout
        self._shell = _DEFAULT_SHELL
        self._folders = {*_STANDARD_FOLDERS, *_MORE_STANDARD_FOLDERS}
        handlers: dict[str, Callable[[Instruction], None]] = {
            "FROM": self._apply_from,
            "WORKDIR": self._apply_workdir,
            "COPY": self._apply_copy,
            "ADD": self._apply_add,
            "RUN": self._apply_run,
            "ENV": self._apply_env,
            "ARG": self._apply_arg,
            "USER": self._apply_user,
            "SHELL": self._apply_shell,
        }
        for instruction in parse_instructions(text):
            if instruction.name in handlers:
                handlers[instruction.name](instruction)
            elif instruction.name not in _IGNORED_INSTRUCTIONS:
                raise DockerfileError(instruction.line, f"there is no instruction {instruction.name!r}")
        if not self.base:
            raise DockerfileError(1, "it names no base image: FROM is missing")

    def _apply_from(self, instruction: Instruction) -> None:
        if self.base:
            raise DockerfileError(instruction.line, "FROM: several stages can't be followed without building an image")
        named = split_words(instruction.rest, self._arguments)
        if not named:
            raise DockerfileError(instruction.line, "FROM: the image's name is missing")
        self.base = named[0]
        self._arguments = {}  # those before FROM are seen by FROM alone

    def _apply_workdir(self, instruction: Instruction) -> None:
        self.workdir = self._resolve(unquote(instruction.rest, self._get_variables()))
        self._folders.add(self.workdir)
        self._add_exec(["mkdir", "-p", self.workdir], cwd="/")

    def _apply_env(self, instruction: Instruction) -> None:
        self.env |= parse_env_pairs(instruction, self._get_variables())

    def _apply_arg(self, instruction: Instruction) -> None:
        for word in split_words(instruction.rest, self._get_variables()):
            name, separator, value = word.partition("=")
            if separator:
                self._arguments[name] = value

    def _apply_user(self, instruction: Instruction) -> None:
        if (user := unquote(instruction.rest, self._get_variables())) not in _ROOT_USERS:
            raise DockerfileError(
                instruction.line, f"USER: {user}: only root can be followed without building an image"
            )

    def _apply_shell(self, instruction: Instruction) -> None:
        if (shell := _parse_json_words(instruction.rest)) is None:
            raise DockerfileError(instruction.line, "SHELL: this takes a list of words in JSON")
        self._shell = shell

    def _apply_run(self, instruction: Instruction) -> None:
        if bad := set(instruction.flags) - {"network", "mount"}:
            raise DockerfileError(instruction.line, f"RUN: --{min(bad)} can't be followed without building an image")
        if any("type=cache" not in mount for mount in instruction.flags.get("mount", [])):
            raise DockerfileError(instruction.line, "RUN: --mount can't be followed without building an image")
        env = self._arguments | self.env
        if (argv := _parse_json_words(instruction.rest)) is not None:
            self._add_exec(argv, env=env)
            return
        command = instruction.rest
        if instruction.documents and find_here_document_name(command):
            command = instruction.documents[0].text
            if command.startswith("#!"):
                raise DockerfileError(
                    instruction.line, "RUN: a here-document that names its own program can't be followed"
                )
        else:
            command += "".join(f"\n{document.text}{document.name}" for document in instruction.documents)
        self._add_exec([*self._shell, command], env=env)

    def _apply_add(self, instruction: Instruction) -> None:
        for source in self._list_operands(instruction)[:-1]:
            if "://" in source or source.startswith("git@"):
                raise DockerfileError(
                    instruction.line, f"ADD: {source} is a download, and nothing here reaches the network"
                )
            if source.endswith(_ARCHIVES):
                raise DockerfileError(
                    instruction.line, f"ADD: {source} would be unpacked: use COPY and RUN tar instead"
                )
        self._apply_copy(instruction)

    def _apply_copy(self, instruction: Instruction) -> None:
        if bad := set(instruction.flags) - {"chown", "chmod", "link"}:
            raise DockerfileError(
                instruction.line, f"{instruction.name}: --{min(bad)} can't be followed without building an image"
            )
        *sources, target = self._list_operands(instruction)
        into = target.endswith(("/", "/.")) or target == "." or len(sources) > 1
        place = self._resolve(target)
        into = into or place in self._folders
        placed = [inside for source in sources for inside in self._add_copy_steps(instruction, source, place, into)]
        if "chmod" in instruction.flags:
            self._add_exec(["chmod", "-R", instruction.flags["chmod"][-1], *placed], cwd="/")

    def _list_operands(self, instruction: Instruction) -> list[str]:
        """The sources of COPY or ADD, and the target."""
        if (listed := _parse_json_words(instruction.rest)) is not None:
            named = [expand(word, self._get_variables()) for word in listed]
        else:
            named = split_words(instruction.rest, self._get_variables())
        if len(named) < 2:
            raise DockerfileError(instruction.line, f"{instruction.name}: it takes sources and a target")
        return named

    def _add_copy_steps(self, instruction: Instruction, source: str, place: str, into: bool) -> list[str]:
        """Adds the steps for one source of COPY. Returns the targets."""
        name = find_here_document_name(source)
        document = next((document for document in instruction.documents if document.name == name), None)
        if document is not None:
            content = expand(document.text, self._get_variables()) if document.expands_variables else document.text
            target = posixpath.join(place, document.name) if into else place
            self.steps.append({"type": "upload_file", "content": content, "target": target})
            return [target]
        placed = []
        for path in self._find_sources(instruction, source):
            if path.is_dir():  # its content, not itself
                if (self._context / ".dockerignore").exists():
                    raise DockerfileError(
                        instruction.line, f"{instruction.name}: .dockerignore can't be followed for a folder"
                    )
                self.steps.append({"type": "upload_dir", "source": str(path), "target": place})
                self._folders.add(place)
                placed.append(place)
            else:
                target = posixpath.join(place, path.name) if into else place
                self.steps.append({"type": "upload_file", "source": str(path), "target": target})
                placed.append(target)
        return placed

    def _find_sources(self, instruction: Instruction, source: str) -> list[Path]:
        relative = posixpath.normpath("/" + source).lstrip("/")  # nothing is above the context
        if any(sign in relative for sign in "*?["):
            try:
                sources = sorted(self._context.glob(relative))
            except ValueError as error:
                raise DockerfileError(
                    instruction.line, f"{instruction.name}: {source} is no pattern: {error}"
                ) from error
        else:
            sources = [path for path in [self._context / relative] if os.path.exists(path)]
        if not sources:
            raise DockerfileError(instruction.line, f"{instruction.name}: there is no {source} in {self._context}")
        return sources

    def _get_variables(self) -> dict[str, str]:
        return {"PATH": _DEFAULT_PATH} | self._arguments | self.env

    def _resolve(self, path: str) -> str:
        return posixpath.normpath(posixpath.join(self.workdir or "/", path))

    def _add_exec(self, argv: list[str], *, cwd: str | None = None, env: dict[str, str] | None = None) -> None:
        self.steps.append(
            {
                "type": "exec",
                "command": argv,
                "cwd": cwd or self.workdir or "/",
                "env": dict(env or {}),
                "timeout_seconds": self._timeout,
            }
        )


def find_last_workdir(text: str) -> str | None:
    """The workdir of the image, as far as its Dockerfile sets one."""
    workdir: str | None = None
    variables: dict[str, str] = {}
    for instruction in parse_instructions(text):
        if instruction.name == "FROM":
            workdir = None
        elif instruction.name == "ENV":
            variables |= parse_env_pairs(instruction, variables)
        elif instruction.name == "ARG":
            pairs = [word.partition("=") for word in split_words(instruction.rest, variables)]
            variables |= {name: value for name, separator, value in pairs if separator}
        elif instruction.name == "WORKDIR":
            named = unquote(instruction.rest, variables)
            workdir = posixpath.normpath(posixpath.join(workdir or "/", named))
    return workdir


def _parse_json_words(text: str) -> list[str] | None:
    if not text.startswith("["):
        return None
    try:
        words = json.loads(text)
    except ValueError:
        return None  # as Docker has it: then it is a command line
    return words if isinstance(words, list) and words and all(isinstance(word, str) for word in words) else None
