"""The benchmarks' command line: each of them has a command, a target in the Makefile, and help that is a sentence."""

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from benchmarks.__main__ import BENCHMARKS, cli
from benchmarks.gateway.servers import write_metadata


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_has_a_command_with_whole_sentences(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    assert command.name == name
    for option in command.params:
        if isinstance(option, click.Option):
            assert option.help is not None
            assert option.help[0].isupper()
            assert option.help[-1] == "."


def test_every_benchmark_has_a_make_target() -> None:
    line = next(
        it for it in Path("Makefile").read_text(encoding="utf-8").splitlines() if it.startswith("BENCHMARKS :=")
    )
    assert set(line.rpartition(",")[2].rstrip(")").split()) == set(BENCHMARKS)


def test_help_lists_the_benchmarks() -> None:
    told = CliRunner().invoke(cli, ["--help"], catch_exceptions=False).output
    assert all(name in told for name in BENCHMARKS)
    assert "No such command" in CliRunner().invoke(cli, ["nothing"]).output


def test_another_checkout_brings_its_own_plugins(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    lines = [
        "[project]",
        'name = "polar-before"',
        '[project.entry-points."polar.dialects"]',
        'old = "polar.old:Old"',
        "",
    ]
    (checkout / "pyproject.toml").write_text("\n".join(lines), encoding="utf-8")
    folder = write_metadata(checkout, tmp_path / "metadata")
    written = {it.parent.name: it.read_text(encoding="utf-8") for it in folder.glob("*/entry_points.txt")}
    assert "old = polar.old:Old" in written.pop("polar_before-0.dist-info")
    assert set(written.values()) == {""}  # this checkout's own name
    assert len(written) == 1
