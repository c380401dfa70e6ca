"""Four made-up instances with exactly the public fields of SWE-bench and SWE-Gym, and plays that solve them, or don't.

python examples/swe/made_up.py FOLDER

FOLDER/verified.jsonl     two rows as SWE-bench Verified has them: lists as JSON in text
FOLDER/gym.jsonl          two rows as SWE-Gym has them
FOLDER/repositories/      the repositories that they are about, small ones, with real histories and tests
FOLDER/plays/             turns for the scripted engine: right.json solves all four, mixed.json two, wrong.json none
FOLDER/matrix.toml        all of it, for polar matrix
"""

import argparse
import json
import os
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"  # ends a session of mini-swe-agent; others end with the next turn


class Instance(NamedTuple):
    """An issue: the repository before and after the commit that resolved it."""

    repo: str
    number: int
    problem: str
    code: dict[str, str]  # that the commit changed
    tests: dict[str, str]
    fail_to_pass: list[str]
    pass_to_pass: list[str]
    wrong: tuple[str, str, str]  # what doesn't resolve it: in this file, that for this

    @property
    def instance_id(self) -> str:
        return f"{self.repo.replace('/', '__')}-{self.number}"


class Patches(NamedTuple):
    instance: Instance
    right: str
    wrong: str


SLUGS = {
    "slugs/__init__.py": "from slugs.text import slug\n",
    "slugs/text.py": "def slug(text):\n    return text.replace(' ', '-')\n\n\n"
    "def words(text):\n    return text.split(' ')\n",
    "tests/test_text.py": "from slugs import slug\n\n\ndef test_spaces():\n    assert slug('a b') == 'a-b'\n",
}
CLOCK = {
    "clock.py": "def minutes(text):\n    hours, rest = text.split(':')\n    return int(hours) * 60 + int(rest)\n\n\n"
    "def shown(minutes):\n    return f'{minutes // 60}:{minutes % 60}'\n",
    "tests/__init__.py": "",
    "tests/test_clock.py": "import unittest\n\nimport clock\n\n\nclass ClockTest(unittest.TestCase):\n"
    "    def test_minutes(self):\n        self.assertEqual(clock.minutes('1:30'), 90)\n",
}
REPOSITORIES = {"made-up/slugs": SLUGS, "made-up/clock": CLOCK}

VERIFIED = [
    Instance(
        "made-up/clock",
        7,
        "`shown` leaves out a zero: shown(65) is '1:5' and should be '1:05'.",
        {"clock.py": CLOCK["clock.py"].replace("{minutes % 60}", "{minutes % 60:02}")},
        {
            "tests/test_clock.py": CLOCK["tests/test_clock.py"]
            + "\n    def test_shown(self):\n        self.assertEqual(clock.shown(65), '1:05')\n"
        },
        ["test_shown (tests.test_clock.ClockTest)"],
        ["test_minutes (tests.test_clock.ClockTest)"],
        ("clock.py", "% 60}", "% 60:03}"),
    ),
    Instance(
        "made-up/clock",
        9,
        "A time before midnight can't be read: minutes('-0:10') should be -10.",
        {
            "clock.py": CLOCK["clock.py"]
            .replace("{minutes % 60}", "{minutes % 60:02}")
            .replace(
                "    hours, rest = text.split(':')\n    return int(hours) * 60 + int(rest)\n",
                "    sign = -1 if text.startswith('-') else 1\n    hours, rest = text.lstrip('-').split(':')\n"
                "    return sign * (int(hours) * 60 + int(rest))\n",
            )
        },
        {
            "tests/test_clock.py": CLOCK["tests/test_clock.py"]
            + "\n    def test_shown(self):\n        self.assertEqual(clock.shown(65), '1:05')\n"
            + "\n    def test_before_midnight(self):\n        self.assertEqual(clock.minutes('-0:10'), -10)\n"
        },
        ["test_before_midnight (tests.test_clock.ClockTest)"],
        ["test_minutes (tests.test_clock.ClockTest)", "test_shown (tests.test_clock.ClockTest)"],
        ("clock.py", "return int(hours) * 60 + int(rest)", "return -int(hours) * 60 - int(rest)"),  # breaks what passed
    ),
]
GYM = [
    Instance(
        "made-up/slugs",
        12,
        "Capital letters stay in slugs: slug('A B') should be 'a-b'.",
        {"slugs/text.py": SLUGS["slugs/text.py"].replace("text.replace", "text.lower().replace")},
        {
            "tests/test_text.py": SLUGS["tests/test_text.py"]
            + "\n\ndef test_capitals():\n    assert slug('A B') == 'a-b'\n"
        },
        ["tests/test_text.py::test_capitals"],
        ["tests/test_text.py::test_spaces"],
        ("tests/test_text.py", "assert slug", "assert True or slug"),  # changes what it is graded by
    ),
    Instance(
        "made-up/slugs",
        15,
        "`words` finds empty words where there are several spaces: words('a  b') should be ['a', 'b'].",
        {
            "slugs/text.py": SLUGS["slugs/text.py"]
            .replace("text.replace", "text.lower().replace")
            .replace("text.split(' ')", "text.split()")
        },
        {
            "tests/test_words.py": "import pytest\n\nfrom slugs.text import words\n\n\n"
            "@pytest.mark.parametrize('text', ['a  b', ' a b'])\n"
            "def test_words(text):\n    assert words(text) == ['a', 'b']\n",
            "tests/test_text.py": SLUGS["tests/test_text.py"]
            + "\n\ndef test_capitals():\n    assert slug('A B') == 'a-b'\n",
        },
        # As the sets have them: what stands behind a space was lost when they were made.
        ["tests/test_words.py::test_words[a", "tests/test_words.py::test_words["],
        ["tests/test_text.py::test_spaces", "tests/test_text.py::test_capitals"],
        ("slugs/text.py", "text.split(' ')", "[text]"),
    ),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--harness", nargs="+", default=["codex", "claude_code", "qwen_code", "pi"])
    asked = parser.parse_args()
    folder = asked.folder.absolute()
    patches = write_rows(folder)
    write_matrix(folder, write_plays(folder, patches), asked.harness)
    print(f"{len(patches)} instances in {folder}")


def write_rows(folder: Path) -> list[Patches]:
    """Both files, and the repositories; patches for each instance."""
    patches = []
    rows: dict[str, list[dict[str, Any]]] = {"verified": [], "gym": []}
    for repo, files in REPOSITORIES.items():
        work = folder / "repositories" / repo.replace("/", "__")
        if work.exists():
            raise SystemExit(f"{folder} has been made already: remove it first.")
        work.mkdir(parents=True)
        git(work, "init", "-q", "-b", "main")
        commit(work, files, "The beginning")
        for instance in (one for one in [*VERIFIED, *GYM] if one.repo == repo):
            wrong = wrong_patch(work, *instance.wrong)
            row = resolved(work, instance)
            patches.append(Patches(instance, row["patch"], wrong))
            rows["verified" if instance in VERIFIED else "gym"].append(row)
    for row in rows["verified"]:
        row |= {name: json.dumps(row[name]) for name in ("FAIL_TO_PASS", "PASS_TO_PASS")}
        row |= {"environment_setup_commit": row["base_commit"], "difficulty": "<15 min fix"}
    for name, listed in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in listed))
    return patches


def wrong_patch(work: Path, file: str, right: str, wrong: str) -> str:
    text = (work / file).read_text()
    assert right in text
    (work / file).write_text(text.replace(right, wrong))
    patch = git(work, "diff")
    git(work, "checkout", "-q", "--", file)
    return patch


def resolved(work: Path, instance: Instance) -> dict[str, Any]:
    """Commits what resolves it: the row."""
    base = git(work, "rev-parse", "HEAD").strip()
    commit(work, instance.code | instance.tests, f"Resolve #{instance.number}")
    return {
        "instance_id": instance.instance_id,
        "repo": instance.repo,
        "base_commit": base,
        "patch": git(work, "diff", base, "--", *instance.code),
        "test_patch": git(work, "diff", base, "--", *instance.tests),
        "problem_statement": instance.problem,
        "hints_text": "",
        "created_at": "2025-01-01T00:00:00Z",
        "version": "1.0",
        "FAIL_TO_PASS": instance.fail_to_pass,
        "PASS_TO_PASS": instance.pass_to_pass,
    }


def commit(work: Path, files: dict[str, str], message: str) -> None:
    for name, text in files.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(text)
    git(work, "add", "-A")
    git(work, "-c", "user.name=a", "-c", "user.email=a@example.com", "commit", "-q", "-m", message)


def git(work: Path, *words: str) -> str:
    plain = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    done = subprocess.run(["git", *words], cwd=work, env=os.environ | plain, check=True, capture_output=True, text=True)
    return done.stdout


def write_plays(folder: Path, patches: list[Patches]) -> dict[str, Path]:
    """A file for each model that the scripted engine plays."""
    (folder / "plays").mkdir()
    written = {}
    for model, solves in (("right", (0, 1)), ("mixed", (0,)), ("wrong", ())):
        plays = {
            one.instance.instance_id: play(one.instance.problem, one.right if number % 2 in solves else one.wrong)
            for number, one in enumerate(patches)
        }
        written[model] = folder / "plays" / f"{model}.json"
        written[model].write_text(json.dumps({"turns": [{"text": "I know no such issue."}], "plays": plays}))
    return written


def play(problem: str, patch: str) -> dict[str, Any]:
    turns = [
        {"text": "First a look at the repository.", "shell": "git log --oneline | head -n 3; ls"},
        {"text": "Changing the code.", "shell": f"git apply - <<'END'\n{patch}END"},
        {"text": "That is all.", "shell": SUBMIT},
        {"text": "That is all."},
    ]
    return {"match": literal(problem), "turns": turns}


def literal(text: str) -> str:
    """A pattern for the first words of a text, however a harness passes it on."""
    return text.split(":")[0].replace("`", ".").replace("(", ".").replace(")", ".")


def write_matrix(folder: Path, plays: dict[str, Path], harnesses: list[str]) -> None:
    lines = ['tasks = ["tasks.jsonl"]', f"harnesses = {json.dumps(harnesses)}", 'output = "matrix"', ""]
    for model, play in plays.items():
        lines += [f"[models.{model}]", 'kind = "scripted"', f"options = {{ play = {json.dumps(str(play))} }}", ""]
    (folder / "matrix.toml").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
