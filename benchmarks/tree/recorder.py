"""Records groups of real harness sessions for `make bench-tree`.

    python -m benchmarks.tree.recorder FOLDER --tokenizer DIR [--harness NAME]

A group is one task run 16 times by a real harness (looked for on PATH and where `make` installs them) against the
scripted engine and a real gateway. The sessions differ in what is sampled: each has turns of its own, 15 to 30 of them,
about 150 tokens sampled and 350 observed each, with the long tails that such things have. They run in the same folder
one after the other, as they would in sandboxes that are alike.

What is kept of a group is the outline of its token tree (benchmarks.tree.groups), and no text.
"""

import asyncio
import shutil
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from random import Random

import click
import msgspec

from benchmarks.fidelity import sessions as fidelity_sessions
from benchmarks.fidelity.sessions import DRIFT, HARNESS_FOLDERS, Agent
from benchmarks.tree.groups import BUILDERS, TreeOutline, make_group, make_outline
from polar.engines.scripted.play import Play, ScriptedTurn
from polar.engines.scripted.server import ScriptedServer
from polar.records.trajectory import SessionPaths
from polar.trajectory.session import read_session_paths

SESSIONS = 16
NAMES = {"claude_code": "claude-code", "codex": "codex", "pi": "pi", "gemini_cli": "think-stripped"}
ABOUT = {"gemini_cli": "gemini-cli, which drops the model's thinking from its turns"}
MOST_TURNS = {"gemini_cli": 29}  # from its 30th turn on it asks the model whether it goes round in circles
WORDS = ("amber", "bridge", "copper", "desert", "engine", "fabric", "garden", "harbor", "island", "jacket", "kernel")
_PER_WORD = 1.35  # tokens, as the scripted engine spells them


def make_play(seed: int, most_turns: int) -> Play:
    """Thinking, a sentence and a command that prints something; the call itself takes about 40 tokens."""
    random = Random(seed)
    turns = []
    for number in range(min(random.randint(14, 29), most_turns - 1)):
        said = max(20.0, random.lognormvariate(4.55, 0.6)) / _PER_WORD
        lines = max(3, round(random.lognormvariate(5.5, 0.8) / 12))
        thought, told = _make_words(random, 0.6 * said), _make_words(random, 0.4 * said)
        shell = f"for i in $(seq {lines}); do echo $i {_make_words(random, 6)}; done | tee note-{number}.txt"
        turns.append(ScriptedTurn(reasoning=thought, text=told, shell=shell))
    return Play([*turns, ScriptedTurn(reasoning=_make_words(random, 40), text=_make_words(random, 30))])


def _make_words(random: Random, count: float) -> str:
    return " ".join(random.choices(WORDS, k=max(1, round(count))))


def record_group(harness: str, tokenizer: Path, folder: Path) -> list[SessionPaths]:
    """Each session in a process of its own: what a gateway with its tokenizer leaves behind is large."""
    sessions = []
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as alone:
        for seed in range(SESSIONS):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            session = alone.submit(record_session, harness, seed, tokenizer, folder).result()
            sessions.append(session)
            lengths = [len(path.sampled) for path in session.paths if path.num_trainable]
            longest = max(len(path.prompt) + len(path.sampled) for path in session.paths)
            told = f"{len(session.paths)} calls of which {len(lengths)} train"
            mean = sum(lengths) / len(lengths)
            click.echo(f"{harness} {seed}: {told}, {mean:.0f} sampled tokens a turn, {longest:,} at the end")
    return sessions


def record_session(harness: str, seed: int, tokenizer: Path, folder: Path) -> SessionPaths:
    (agent,) = fidelity_sessions.find_installed_agents([harness], HARNESS_FOLDERS)
    return asyncio.run(_run_session(agent, make_play(seed, MOST_TURNS.get(harness, 30)), str(tokenizer), folder))


async def _run_session(agent: Agent, written: Play, tokenizer: str, folder: Path) -> SessionPaths:
    async with ScriptedServer(written, tokenizer=tokenizer, drift=DRIFT) as engine:
        turns = len(written.turns)
        found = await fidelity_sessions.record(
            agent, "auto", engine.url, drops=False, turns=turns, tokenizer=tokenizer, folder=folder
        )
    return read_session_paths(found.session, found.exchanges)


def print_sizes(drawing: TreeOutline) -> None:
    group = make_group(drawing)
    tokens = {name: build(group).tokens for name, build in BUILDERS.items()}
    click.echo(f"{drawing.name}: " + ", ".join(f"{name} {count:,}" for name, count in tokens.items()))


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--tokenizer", required=True, type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option(
    "--harness",
    "harnesses",
    multiple=True,
    type=click.Choice(list(NAMES)),
    help="Record only this one; may be repeated.",
)
def main(folder: Path, tokenizer: Path, harnesses: tuple[str, ...]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for harness in harnesses or NAMES:
        name = NAMES[harness]
        with tempfile.TemporaryDirectory(prefix="polar-trees-", ignore_cleanup_errors=True) as scratch:
            sessions = record_group(harness, tokenizer.absolute(), Path(scratch) / "session")
        about = f"{ABOUT.get(harness, name)}: {SESSIONS} sessions of one task, 15 to 30 turns"
        drawing = make_outline(name, about, sessions)
        (folder / f"{name}.json").write_bytes(msgspec.json.encode(drawing) + b"\n")
        print_sizes(drawing)


if __name__ == "__main__":
    main()
