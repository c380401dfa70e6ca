"""The pages that the site is made of, and links between them."""

import re
from pathlib import Path

import pytest

from polar.records.session import PLATFORM_REASONS
from polar.records.task import MASKED_REASONS
from tests.docs.static_checks import is_make_target
from tools.docs.check_site import find_external_resources
from tools.docs.pages import BrokenLinkError, build_pages, rewrite_links

ROOT = Path(__file__).parents[2]


def test_pages_of_the_repository(tmp_path: Path) -> None:
    """Every relative link of the documents leads to a file of the repository, or to a generated page."""
    build_pages(ROOT, tmp_path, {"settings.md": "# Settings\n"})
    assert (tmp_path / "index.md").is_file()
    assert (tmp_path / "project" / "CHANGELOG.md").is_file()
    assert "ask_model" in (tmp_path / "source" / "examples" / "hello" / "agent.py.md").read_text()


def test_navigation_has_every_page() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        assert page.relative_to(ROOT / "docs").as_posix() in navigation, page


def test_pages_that_code_and_files_mention_exist() -> None:
    """Errors, docstrings and examples that send a reader to docs/X.md, with the heading that they name."""
    mention = re.compile(r"\bdocs/([\w/-]+\.(?:md|svg|png))(?:#([\w-]+))?")
    files = [*map(ROOT.joinpath, ("README.md", "ARCHITECTURE.md", "Makefile", "CONTRIBUTING.md", "SECURITY.md"))]
    for folder in ("src", "examples", "tools", "benchmarks", "tests"):
        files += [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".toml", ".sh", ".yaml")]
    for file in files:
        for page, anchor in mention.findall(file.read_text(encoding="utf-8")):
            if page == "X.md":
                continue
            path = ROOT / "docs" / page
            assert path.is_file(), f"{file.relative_to(ROOT)} mentions docs/{page}"
            assert not anchor or anchor in _anchors(path), f"{file.relative_to(ROOT)}: docs/{page} has no #{anchor}"


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\s-]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_links_in_code_are_left_alone() -> None:
    text = "[a](b.md) `[a](b.md)`\n```\n[a](b.md)\n```\n[web](https://example.com) [here](#there) [c](d.md#e)"
    expected = "[a](X) `[a](b.md)`\n```\n[a](b.md)\n```\n[web](https://example.com) [here](#there) [c](X#e)"
    assert rewrite_links(text, lambda _: "X") == expected


def test_a_broken_link_is_named(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("[x](nowhere.md)")
    with pytest.raises(BrokenLinkError, match=r"docs/index.md: there is no nowhere.md."):
        build_pages(tmp_path, tmp_path / "pages", {})


def test_what_is_loaded_from_elsewhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "bad.html").write_text(
        '<link rel="stylesheet" href="https://fonts.example/x.css"><script src=//cdn.example/x.js></script>'
        '<img src="https://img.example/x.png"><a href="https://example.com">fine</a><link rel="canonical" href="https://x.example">'
    )
    (tmp_path / "bad.css").write_text("@font-face{src:url(https://fonts.example/y.woff)}")
    found = find_external_resources(tmp_path)
    assert sorted(line.partition(": ")[2] for line in found) == [
        "//cdn.example/x.js",
        "https://fonts.example/x.css",
        "https://fonts.example/y.woff",
        "https://img.example/x.png",
    ]


def test_tests_that_pages_mention_exist() -> None:
    """Files of the suites; a task's own tests/test_x.py is none."""
    suites = "|".join(path.name for path in (ROOT / "tests").iterdir() if path.is_dir())
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for name in re.findall(rf"\btests/(?:{suites})/[\w/]+(?:\.\w+)?", page.read_text(encoding="utf-8")):
            assert (ROOT / name).exists(), f"{page.relative_to(ROOT)} mentions {name}"


def test_targets_that_pages_mention_exist() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for name in re.findall(r"(?:`|; )make ([a-z][\w-]*)", page.read_text(encoding="utf-8")):
            assert is_make_target(name) or name == "bench-NAME", f"{page.relative_to(ROOT)} mentions make {name}"


def test_metrics_that_the_documents_name_are_in_the_code() -> None:
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    page = (ROOT / "docs" / "watching.md").read_text(encoding="utf-8")
    for name in sorted(set(re.findall(r"\bpolar_[a-z_]+", page))):
        stem = re.sub(r"_(total|bucket|count|sum)$", "", name)
        assert f'"{name}"' in code or f'"{stem}"' in code, name


def test_reasons_are_explained() -> None:
    page = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")
    for reason in PLATFORM_REASONS | MASKED_REASONS:
        assert f"`{reason}`" in page, reason
