"""Every command and code block of README.md and docs/ is run, or says why not."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, Block, list_pages, parse_blocks, read_blocks
from tests.docs.runner import Page, read_document
from tests.docs.static_checks import find_mistakes

PAGES = list_pages()
BLOCKS = [block for page in PAGES for block in read_blocks(page)]
RUNNABLE = {"shell", "python", "output", "file"}
QUICK = {"README.md"}
"""Pages whose blocks `make test` runs; `make test-docs` runs those of all."""


def test_every_block_is_accounted_for() -> None:
    counts = Counter(block.accounted for block in BLOCKS)
    print(f"{len(BLOCKS)} blocks: {dict(counts)}")
    assert not [str(block) for block in BLOCKS if block.accounted == "neither"]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_what_a_block_names_is_there(block: Block) -> None:
    assert not find_mistakes(block)


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.kind and block.kind not in RUNNABLE], ids=str)
def test_documents_are_read(block: Block) -> None:
    read_document(block)


def test_blocks_that_another_test_runs() -> None:
    for block in BLOCKS:
        if block.kind == "by":
            file, _, name = block.argument.partition("::")
            assert f"def {name}(" in (ROOT / file).read_text(), str(block)


def test_excerpts_are_what_the_files_say() -> None:
    """Line by line, in the file's order; between them the file may have more."""
    for block in BLOCKS:
        if block.excerpt_of:
            lines = iter([line.strip() for line in (ROOT / block.excerpt_of).read_text().splitlines()])
            for line in filter(None, map(str.strip, block.text.splitlines())):
                assert line == "..." or line in lines, f"{block}: {block.excerpt_of} has no line {line!r} there"


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    opened = Page(tmp_path)
    yield opened
    opened.close()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else [pytest.mark.docs])
        for name in PAGES
        if any(block.kind in RUNNABLE for block in read_blocks(name))
    ],
)
def test_a_page_runs(name: str, page: Page) -> None:
    for block in read_blocks(name):
        if block.kind in RUNNABLE:
            page.run(block)


def test_markers_and_blocks() -> None:
    text = (
        "Text.\n\n<!-- run: shell -->\n\n    ls\n\n    pwd\n\nMore.\n\n"
        "<!-- not run: because -->\n```python\nx = 1\n```\n"
        "- item\n\n    of the item\n\nText.\n\n<!-- run: file a.toml -->\n\nText between.\n\n```toml\nx = 1\n```\n"
        "```python examples/x.py\ny\n```\n"
    )
    found = [(block.line, block.text, block.accounted, block.kind) for block in parse_blocks("p", text)]
    assert found == [
        (5, "ls\n\npwd\n", "run", "shell"),
        (12, "x = 1\n", "marked", ""),
        (25, "x = 1\n", "neither", ""),
        (28, "y\n", "excerpt", ""),
    ]


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("", "polar captur -- x"),
        ("", "polar run TASK... [--sample N]"),
        ("", "POLAR_X=1 polar session begin"),
        ("", "make nothing"),
        ("", "python -m polar.nothing"),
        ("", "python examples/nothing.py"),
        ("python", "from polar.config import nothing"),
        ("python", "import polar\npolar.nothing()"),
        ("python", "x = = 1"),
        ("toml", "x = "),
    ],
)
def test_mistakes_are_found(language: str, text: str) -> None:
    assert find_mistakes(Block("p", 1, text, language))
