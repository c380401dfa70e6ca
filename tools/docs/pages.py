"""Collects the pages of the site in one folder.

    docs/**              as they are
    project files        ARCHITECTURE.md, ...: below project/
    the reference        generated from the code: below reference/
    linked files         what a page links to outside of docs/ becomes a page below source/

A page may link to any file of the repository, as it does where the repository is read. Here such links are rewritten
to the pages that the files have become, so that the site needs nothing but itself.
"""

import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath

PROJECT_FILES = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md")

_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")
_CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.DOTALL | re.MULTILINE)
_NO_PAGES = (".txt",)
_LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml", ".sh": "bash", ".json": "json"}
_NO_SEARCH = "---\nsearch:\n  exclude: true\n---\n\n"


class BrokenLinkError(Exception):
    pass


def build_pages(root: Path, target: Path, reference: Mapping[str, str]) -> None:
    """Writes all pages into `target`, whose earlier content is removed. `reference` has generated pages by name."""
    shutil.rmtree(target, ignore_errors=True)
    linked: set[PurePosixPath] = set()
    for file in sorted((root / "docs").rglob("*")):
        if file.is_file() and file.suffix not in _NO_PAGES:
            name = PurePosixPath(file.relative_to(root))
            _write_page(root, name, target / name.relative_to("docs"), linked)
    for name in map(PurePosixPath, PROJECT_FILES):
        if (root / name).is_file():
            _write_page(root, name, target / _site_path(name), linked)
    for page_name, text in reference.items():
        page = target / "reference" / page_name
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text, encoding="utf-8")
    for name in sorted(linked):
        page = target / _site_path(name)
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(_source_page(root, name), encoding="utf-8")


def _write_page(root: Path, name: PurePosixPath, page: Path, linked: set[PurePosixPath]) -> None:
    page.parent.mkdir(parents=True, exist_ok=True)
    if name.suffix != ".md":
        shutil.copyfile(root / name, page)
        return

    def relink(path: str) -> str:
        resolved = PurePosixPath(os.path.normpath(name.parent / path))
        site_path = _site_path(resolved)
        if site_path.parts[0] == "reference":
            return path  # generated; mkdocs finds out whether it is there
        if not (root / resolved).exists():
            raise BrokenLinkError(f"{name}: there is no {path}.")
        if site_path.parts[0] == "source":
            linked.add(resolved)
        return os.path.relpath(site_path, _site_path(name).parent)

    page.write_text(rewrite_links((root / name).read_text(encoding="utf-8"), relink), encoding="utf-8")


def rewrite_links(text: str, relink: Callable[[str], str]) -> str:
    """Markdown in which the path of each relative link is what `relink` makes of it. Code is left alone."""
    parts, end = [], 0
    for code in _CODE.finditer(text):
        parts += [_LINK.sub(lambda link: relink(link[1]), text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, _LINK.sub(lambda link: relink(link[1]), text[end:])])


def _site_path(name: PurePosixPath) -> PurePosixPath:
    """Where a file of the repository is in the site."""
    if name.parts[0] == "docs":
        return name.relative_to("docs")
    if str(name) == "README.md":
        return PurePosixPath("index.md")
    if str(name) in PROJECT_FILES:
        return PurePosixPath("project", name)
    return PurePosixPath("source", f"{name}.md")


def _source_page(root: Path, name: PurePosixPath) -> str:
    path = root / name
    title = f"{_NO_SEARCH}# {name}\n\n"
    if path.is_dir():
        files = sorted(file.relative_to(root).as_posix() for file in path.iterdir() if not file.name.startswith("."))
        return title + "A folder of the repository:\n\n" + "".join(f"- `{file}`\n" for file in files)
    fence = "`" * 6
    text = path.read_text(encoding="utf-8").rstrip("\n")
    return f"{title}{fence}{_LANGUAGES.get(path.suffix, 'text')}\n{text}\n{fence}\n"
