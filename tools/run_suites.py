"""Runs test suites one after the other, keeps their results, and prints one table.

    python tools/run_suites.py all [--only SUITE]... [--again]
    python tools/run_suites.py repeat [--runs 20]

`all` runs every suite that this machine can run. `repeat` runs `make test` many times, alternately on an idle machine
and beside four busy loops. Both keep one record a run in .cache/suites, by commit and by what differs from it, so that
a second call continues where the first one stopped.
"""

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / ".cache" / "suites"
BUSY_LOOPS = 4
# Ends with the process that started it, however that ends.
BUSY_LOOP = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    for _ in range(10**6): pass"
_MAX_REASON = 100  # characters of a reason in the table
_POLL_SECONDS = 1.0
_ENDING_SECONDS = 60.0


@dataclass
class Record:
    """How one run of a suite ended. `not_run` says why it could not be run here."""

    suite: str
    passed: int = 0
    failed: int = 0
    skipped: dict[str, int] = field(default_factory=dict)  # tests by reason
    seconds: float = 0.0
    status: int = 0  # of make
    not_run: str | None = None
    load: str = ""

    @property
    def is_good(self) -> bool:
        return self.failed == 0 and self.status == 0


def find_sandbox_problem() -> str | None:
    if os.geteuid() != 0:
        return "sandboxes need root"
    return None if shutil.which("bwrap") else "bubblewrap is not installed (Debian: apt-get install bubblewrap)"


def find_container_problem() -> str | None:
    problems = []
    for engine in ("docker", "podman"):
        if shutil.which(engine) is None:
            problems.append(f"{engine} is not installed")
        elif subprocess.run([engine, "info"], capture_output=True, timeout=60, check=False).returncode != 0:
            problems.append(f"`{engine} info` fails: its engine does not run")
        else:
            return None
    return "; ".join(problems)


def find_npm_problem() -> str | None:
    return None if shutil.which("npm") else "npm is not installed"


SUITES: dict[str, tuple[str, Callable[[], str | None]]] = {
    "test": ("test", find_npm_problem),
    "docs": ("test-docs", lambda: None),
    "slow": ("test-slow", find_npm_problem),
    "properties": ("test-properties", find_npm_problem),
    "harnesses": ("test-harnesses", find_npm_problem),
    "engines": ("test-engines", lambda: None),
    "trainers": ("test-trainers", lambda: None),
    "runtimes": ("test-runtimes", find_sandbox_problem),
    "faults": ("test-faults", find_sandbox_problem),
    "containers": ("test-containers", find_container_problem),
    "cluster": ("test-cluster", lambda: None),
    "simulation": ("test-simulation", lambda: None),
}
"""The make target of each suite, and what tells why it can't be run here."""


def read_junit(path: Path, record: Record) -> None:
    """Adds the results of a junit file of pytest."""
    skipped: Counter[str] = Counter()
    for case in ElementTree.parse(path).iter("testcase"):
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            record.failed += 1
        elif skip is not None:
            skipped[skip.get("message") or "no reason given"] += 1
        else:
            record.passed += 1
    record.skipped = dict(skipped)


def read_simulation(log: str, record: Record) -> None:
    """Adds the results that `python -m tests.simulation` prints: schedules instead of tests."""
    for schedules, problems in re.findall(
        r"^(\d+)(?: of \d+)? schedules in .*, (\d+) with problems$", log, re.MULTILINE
    ):
        record.passed += int(schedules) - int(problems)
        record.failed += int(problems)


def run_suite(name: str, folder: Path, record_name: str) -> Record:
    """Runs a suite's make target. Its output and junit file stay in the folder."""
    target, find_problem = SUITES[name]
    record = Record(name)
    if (problem := find_problem()) is not None:
        record.not_run = problem
        return record
    junit, log = folder / f"{record_name}.xml", folder / f"{record_name}.log"
    junit.unlink(missing_ok=True)
    print(f"{name}: make {target}, output in {log}", flush=True)
    started_at = time.monotonic()
    with log.open("wb") as file:
        command = ["make", target, f"PYTEST_OPTIONS=--junitxml={junit}"]
        record.status = run_to_end(command, file)
    record.seconds = time.monotonic() - started_at
    record.load = " ".join(f"{load:.1f}" for load in os.getloadavg())
    text = log.read_text(errors="replace")
    if junit.exists():
        read_junit(junit, record)
    else:
        read_simulation(text, record)
    if record.status != 0 and record.failed == 0:
        last = text.strip().splitlines()[-1:] or ["no output"]
        record.not_run = f"make {target} failed: {last[0]}"
    return record


def run_to_end(command: Sequence[str], output: IO[bytes]) -> int:
    """The exit status of a command. If this is interrupted, the command and what it started end too."""
    # A signal that arrived before `process` is assigned would leave the command running.
    ending = {signal.SIGINT, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ending)
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=output,
        stderr=output,
        start_new_session=True,
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before),
    )
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(_POLL_SECONDS)  # never blocks for long, so that a signal is handled soon
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(_ENDING_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def get_results_folder() -> Path:
    """One for each state of the working tree."""
    commit = _git("rev-parse", "--short=12", "HEAD").decode().strip()
    untracked = _git("ls-files", "-z", "-o", "--exclude-standard").decode().split("\0")
    files = [path for name in untracked if name and (path := ROOT / name).is_file()]  # not links to folders
    changes = _git("diff", "HEAD") + b"".join(path.read_bytes() for path in files)
    name = f"{commit}-{hashlib.sha256(changes).hexdigest()[:8]}" if changes else commit
    folder = RESULTS / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _git(*words: str) -> bytes:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=True).stdout


def load_record(path: Path) -> Record | None:
    """None where the run did not end."""
    try:
        return Record(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None


def save_record(path: Path, record: Record) -> None:
    unfinished = path.with_suffix(".partial")
    unfinished.write_text(json.dumps(asdict(record), indent=2))
    unfinished.rename(path)


def run_all(folder: Path, names: Sequence[str], *, again: bool) -> list[Record]:
    records = []
    for name in names:
        path = folder / f"{name}.json"
        record = None if again else load_record(path)
        if record is None or record.not_run is not None:
            record = run_suite(name, folder, name)
            save_record(path, record)
        records.append(record)
    return records


def run_repeatedly(folder: Path, runs: int) -> list[Record]:
    """Even runs have the machine to themselves, odd ones share it with busy loops."""
    records = []
    for number in range(runs):
        path = folder / f"repeat-{number:02}.json"
        record = load_record(path)
        if record is None:
            busy = number % 2 == 1
            with start_busy_loops(BUSY_LOOPS if busy else 0):
                record = run_suite("test", folder, path.stem)
            record.suite = f"run {number} ({'busy' if busy else 'idle'})"
            save_record(path, record)
            print(format_table([record]), flush=True)
        records.append(record)
    return records


@contextlib.contextmanager
def start_busy_loops(count: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", BUSY_LOOP, str(os.getpid())]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def format_table(records: Sequence[Record]) -> str:
    """A table in Markdown; a suite's reasons are below each other."""
    rows: list[tuple[str, ...]] = [("suite", "passed", "failed", "skipped", "minutes", "load", "reasons")]
    for record in records:
        reasons = [f"{count}: {reason}" for reason, count in record.skipped.items()]
        if record.not_run is not None:
            reasons.insert(0, record.not_run)
        shown = [reason.replace("|", "/").replace("\n", " ")[:_MAX_REASON] for reason in reasons]
        numbers = (str(record.passed), str(record.failed), str(sum(record.skipped.values())))
        rows.append((record.suite, *numbers, f"{record.seconds / 60:.1f}", record.load, shown[0] if shown else ""))
        rows += [("", "", "", "", "", "", reason) for reason in shown[1:]]
    rows.insert(1, tuple("-" * len(title) for title in rows[0]))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run test suites and print one table.")
    commands = parser.add_subparsers(dest="command", required=True)
    every = commands.add_parser("all", help="Run every suite that this machine can run.")
    every.add_argument("--only", action="append", choices=list(SUITES), help="Run this suite only; may be repeated.")
    every.add_argument("--again", action="store_true", help="Run suites again that have a result for this commit.")
    repeat = commands.add_parser("repeat", help="Run `make test` many times, every second time beside busy loops.")
    repeat.add_argument("--runs", type=int, default=20, help="The number of runs, with those of earlier calls.")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    folder = get_results_folder()
    if options.command == "all":
        records = run_all(folder, options.only or list(SUITES), again=options.again)
    else:
        records = run_repeatedly(folder, options.runs)
    print(format_table(records))
    return 0 if all(record.is_good for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())
