"""What can be checked of any block without running it: syntax, and that what it names is there."""

import ast
import json
import re
import shlex
import tomllib
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import click
import yaml

from polar.cli.main import cli
from tests.docs.blocks import ROOT, Block

_ASSIGNMENT = re.compile(r"^[A-Z_][A-Z0-9_]*=")


def find_mistakes(block: Block) -> list[str]:
    """Empty: none."""
    if block.kind == "output":
        return []
    match block.language:
        case "python":
            return _check_python(block.text)
        case "toml":
            return _try(tomllib.loads, block.text)
        case "json":
            return _try(json.loads, block.text)
        case "yaml":
            return _try(yaml.safe_load, block.text)
        case "text":
            return []
    commands = [command for line in _join_lines(block.text) for command in line.split(" && ")]
    return [mistake for command in commands for mistake in _check_command(command)]


def _try(parse: Callable[[str], object], text: str) -> list[str]:
    try:
        parse(text)
    except (ValueError, yaml.YAMLError) as error:
        return [str(error)]
    return []


def _check_python(text: str) -> list[str]:
    try:
        tree = compile(text, "block", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    except SyntaxError as error:
        return [str(error)]
    mistakes = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "polar":
            module = import_module(node.module)
            mistakes += [
                f"{node.module} has no {name.name}"
                for name in node.names
                if not hasattr(module, name.name) and not _is_module(f"{node.module}.{name.name}")
            ]
        elif isinstance(node, ast.Import):
            names = [name.name for name in node.names if name.name.partition(".")[0] == "polar"]
            mistakes += [f"there is no {name}" for name in names if not _is_module(name)]
    if "import polar\n" in text:
        mistakes += [
            f"polar has no {node.attr}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "polar"
            and not hasattr(import_module("polar"), node.attr)
        ]
    return mistakes


def _is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _join_lines(text: str) -> list[str]:
    """Lines of a script; a usage line's further lines begin deeper."""
    return re.sub(r"\\\n *|\n {6,}", " ", text).splitlines()


def _check_command(line: str) -> list[str]:
    try:
        words = shlex.split(line.partition(" #")[0].replace("[", " ").replace("]", " ").replace("|", " | "))
    except ValueError:
        words = line.split()
    while words and _ASSIGNMENT.match(words[0]):
        words.pop(0)
    if not words:
        return []
    if words[0] == "make":
        targets = (word for word in words[1:] if not _ASSIGNMENT.match(word) and not word.startswith("-"))
        return [
            f"there is no target {target}"
            for target in targets
            if re.fullmatch(r"[\w-]+", target) and not is_make_target(target)
        ]
    if words[0] == "polar":
        return _check_polar(words[1:])
    if words[:2] == ["python", "-m"] and words[2].partition(".")[0] == "polar":
        return [] if _is_module(words[2]) else [f"there is no module {words[2]}"]
    if words[0] == "python" and words[1].startswith("examples/"):
        return [] if (ROOT / words[1]).is_file() else [f"there is no {words[1]}"]
    return []


def _check_polar(words: list[str]) -> list[str]:
    command: click.Command = cli
    context = click.Context(cli)
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        found = [command.get_command(context, name) for name in words[0].split("|")]
        if None in found:
            return [f"there is no command {words[0]}"]
        command = found[0] or command
        words = words[1:]
    known = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    known |= {"--help", "-h", "--version"}
    mistakes = []
    for word in words:
        if word == "--":
            break
        flag = word.partition("=")[0]
        if re.fullmatch(r"--?[a-z][\w-]*", flag) and flag not in known:
            mistakes.append(f"{command.name} has no option {flag}")
    return mistakes


def is_make_target(name: str) -> bool:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    benchmarks = re.search(r"addprefix bench-,([\w -]+)\)", makefile)
    assert benchmarks
    return bool(re.search(rf"^{re.escape(name)}:", makefile, re.MULTILINE)) or (
        name.removeprefix("bench-") in benchmarks[1].split()
    )
