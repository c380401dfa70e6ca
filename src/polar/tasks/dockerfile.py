"""A Dockerfile as steps of a task, for runtimes that build no images.

Its base image is not looked at: the steps run over whatever root the runtime has. What would silently come out as
something else (several stages, downloads, other users) is an error.
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


# Instructions: lines joined, comments gone, here-documents taken in.


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


class DockerfileSteps:
    """What a Dockerfile comes to. Raises DockerfileError, a ConfigError that begins with the line."""

    def __init__(self, text: str, context: Path, timeout: float) -> None:
        """`context` is the folder that COPY copies from."""
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
            "FROM": self._from,
            "WORKDIR": self._workdir,
            "COPY": self._copy,
            "ADD": self._add,
            "RUN": self._run,
            "ENV": self._env,
            "ARG": self._arg,
            "USER": self._user,
            "SHELL": self._set_shell,
        }
        for one in parse_instructions(text):
            if one.name in handlers:
                handlers[one.name](one)
            elif one.name not in _IGNORED_INSTRUCTIONS:
                raise DockerfileError(one.line, f"there is no instruction {one.name!r}")
        if not self.base:
            raise DockerfileError(1, "it names no base image: FROM is missing")

    def _from(self, one: Instruction) -> None:
        if self.base:
            raise DockerfileError(one.line, "FROM: several stages can't be followed without building an image")
        named = split_words(one.rest, self._arguments)
        if not named:
            raise DockerfileError(one.line, "FROM: the image's name is missing")
        self.base = named[0]
        self._arguments = {}  # those before FROM are seen by FROM alone

    def _workdir(self, one: Instruction) -> None:
        self.workdir = self._resolve(unquote(one.rest, self._variables()))
        self._folders.add(self.workdir)
        self._exec(["mkdir", "-p", self.workdir], cwd="/")

    def _env(self, one: Instruction) -> None:
        self.env |= env_pairs(one, self._variables())

    def _arg(self, one: Instruction) -> None:
        for word in split_words(one.rest, self._variables()):
            name, given, value = word.partition("=")
            if given:
                self._arguments[name] = value

    def _user(self, one: Instruction) -> None:
        if (user := unquote(one.rest, self._variables())) not in _ROOT_USERS:
            raise DockerfileError(one.line, f"USER: {user}: only root can be followed without building an image")

    def _set_shell(self, one: Instruction) -> None:
        if (shell := _parse_json_words(one.rest)) is None:
            raise DockerfileError(one.line, "SHELL: this takes a list of words in JSON")
        self._shell = shell

    def _run(self, one: Instruction) -> None:
        if bad := set(one.flags) - {"network", "mount"}:
            raise DockerfileError(one.line, f"RUN: --{min(bad)} can't be followed without building an image")
        if any("type=cache" not in mount for mount in one.flags.get("mount", [])):
            raise DockerfileError(one.line, "RUN: --mount can't be followed without building an image")
        env = self._arguments | self.env
        if (argv := _parse_json_words(one.rest)) is not None:
            self._exec(argv, env=env)
            return
        command = one.rest
        if one.documents and here_document_name(command):
            command = one.documents[0].text
            if command.startswith("#!"):
                raise DockerfileError(one.line, "RUN: a here-document that names its own program can't be followed")
        else:
            command += "".join(f"\n{document.text}{document.name}" for document in one.documents)
        self._exec([*self._shell, command], env=env)

    def _add(self, one: Instruction) -> None:
        for source in self._operands(one)[:-1]:
            if "://" in source or source.startswith("git@"):
                raise DockerfileError(one.line, f"ADD: {source} is a download, and nothing here reaches the network")
            if source.endswith(_ARCHIVES):
                raise DockerfileError(one.line, f"ADD: {source} would be unpacked: use COPY and RUN tar instead")
        self._copy(one)

    def _copy(self, one: Instruction) -> None:
        if bad := set(one.flags) - {"chown", "chmod", "link"}:
            raise DockerfileError(one.line, f"{one.name}: --{min(bad)} can't be followed without building an image")
        *sources, target = self._operands(one)
        into = target.endswith(("/", "/.")) or target == "." or len(sources) > 1
        place = self._resolve(target)
        into = into or place in self._folders
        placed = [inside for source in sources for inside in self._copy_source(one, source, place, into)]
        if "chmod" in one.flags:
            self._exec(["chmod", "-R", one.flags["chmod"][-1], *placed], cwd="/")

    def _operands(self, one: Instruction) -> list[str]:
        """The sources of COPY or ADD, and the target."""
        if (listed := _parse_json_words(one.rest)) is not None:
            named = [expand(word, self._variables()) for word in listed]
        else:
            named = split_words(one.rest, self._variables())
        if len(named) < 2:
            raise DockerfileError(one.line, f"{one.name}: it takes sources and a target")
        return named

    def _copy_source(self, one: Instruction, source: str, place: str, into: bool) -> list[str]:
        """Steps for one source of COPY; where its files went."""
        name = here_document_name(source)
        document = next((document for document in one.documents if document.name == name), None)
        if document is not None:
            content = expand(document.text, self._variables()) if document.expands_variables else document.text
            target = posixpath.join(place, document.name) if into else place
            self.steps.append({"type": "upload_file", "content": content, "target": target})
            return [target]
        placed = []
        for path in self._find_sources(one, source):
            if path.is_dir():  # its content, not itself
                if (self._context / ".dockerignore").exists():
                    raise DockerfileError(one.line, f"{one.name}: .dockerignore can't be followed for a folder")
                self.steps.append({"type": "upload_dir", "source": str(path), "target": place})
                self._folders.add(place)
                placed.append(place)
            else:
                target = posixpath.join(place, path.name) if into else place
                self.steps.append({"type": "upload_file", "source": str(path), "target": target})
                placed.append(target)
        return placed

    def _find_sources(self, one: Instruction, source: str) -> list[Path]:
        relative = posixpath.normpath("/" + source).lstrip("/")  # nothing is above the context
        if any(sign in relative for sign in "*?["):
            try:
                found = sorted(self._context.glob(relative))
            except ValueError as error:
                raise DockerfileError(one.line, f"{one.name}: {source} is no pattern: {error}") from error
        else:
            found = [path for path in [self._context / relative] if os.path.exists(path)]
        if not found:
            raise DockerfileError(one.line, f"{one.name}: there is no {source} in {self._context}")
        return found

    def _variables(self) -> dict[str, str]:
        return {"PATH": _DEFAULT_PATH} | self._arguments | self.env

    def _resolve(self, path: str) -> str:
        return posixpath.normpath(posixpath.join(self.workdir or "/", path))

    def _exec(self, argv: list[str], *, cwd: str | None = None, env: dict[str, str] | None = None) -> None:
        self.steps.append(
            {
                "type": "exec",
                "command": argv,
                "cwd": cwd or self.workdir or "/",
                "env": dict(env or {}),
                "timeout_seconds": self._timeout,
            }
        )


def last_workdir(text: str) -> str | None:
    """Where a built image works, as far as its Dockerfile says."""
    workdir: str | None = None
    variables: dict[str, str] = {}
    for one in parse_instructions(text):
        if one.name == "FROM":
            workdir = None
        elif one.name == "ENV":
            variables |= env_pairs(one, variables)
        elif one.name == "ARG":
            pairs = [word.partition("=") for word in split_words(one.rest, variables)]
            variables |= {name: value for name, given, value in pairs if given}
        elif one.name == "WORKDIR":
            named = unquote(one.rest, variables)
            workdir = posixpath.normpath(posixpath.join(workdir or "/", named))
    return workdir


def _parse_json_words(text: str) -> list[str] | None:
    if not text.startswith("["):
        return None
    try:
        found = json.loads(text)
    except ValueError:
        return None  # as Docker has it: then it is a command line
    return found if isinstance(found, list) and found and all(isinstance(word, str) for word in found) else None
