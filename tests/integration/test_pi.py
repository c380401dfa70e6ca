"""A real harness, end to end: pi in each of its four APIs, with real tools, through `polar capture`."""

from pathlib import Path

import pytest

from tests.harnesses.run import ROOT, check, refused, run

BINARIES = ROOT / ".cache" / "node" / "node_modules" / ".bin"


@pytest.fixture(scope="module", autouse=True)
def pi() -> None:
    if not (BINARIES / "pi").exists():
        pytest.fail(f"{BINARIES} has no pi: run `make test`, which installs it with npm.")


@pytest.mark.parametrize(
    ("flags", "dialect"),
    [
        ([], "openai_chat"),
        (["--provider", "polar-responses", "--model", "polar"], "openai_responses"),
        (["--provider", "polar-anthropic", "--model", "polar"], "anthropic"),
        (["--provider", "polar-google", "--model", "polar"], "google"),
    ],
    ids=["chat", "responses", "anthropic", "google"],
)
async def test_three_turns(tmp_path: Path, flags: list[str], dialect: str) -> None:
    done = await run(tmp_path, ["pi", *flags, "-p", "Write the two files."], BINARIES)
    check(done, tmp_path, dialect=dialect)
    assert not refused(done)
