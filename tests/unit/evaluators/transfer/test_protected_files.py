"""Which of an agent's changes count: by name, by what the task names, and by what decides which file is imported."""

import pytest

from polar.evaluators.changes import FileChange, FolderEntry
from polar.evaluators.project_tests import list_named_tests
from polar.evaluators.signed_run import require_command
from polar.evaluators.transfer.protected_files import ProtectedFiles, ProtectionConfig

FILE = FolderEntry("100644", 1)
PREPARED = [
    *("calc.py", "run.py", "app/__init__.py", "app/models.py", "app/tests.py", "app/forms.py", "checks/check_calc.py"),
    *("testcalc.py", "tests/test_calc.py", "pkg/__init__.py", "pkg/tests/__init__.py", "pkg/tests/test_a.py", "html/x"),
]
NAMED = ["app.tests.AddTest.test_add", "checks/check_calc.py::test_a", "test_b (testcalc.CalcTest)", "forms"]


def counted(
    *added: str, changed: tuple[str, ...] = (), deleted: tuple[str, ...] = (), **config: list[str]
) -> list[str]:
    changes = [FileChange(path, None, FILE) for path in added]
    changes += [FileChange(path, FILE, FILE) for path in changed] + [FileChange(path, FILE, None) for path in deleted]
    protected = ProtectedFiles(ProtectionConfig(**config), files=["hidden/grader.py"], folders=[".grader"], named=NAMED)
    return [change.path for change in protected.split_changes(changes, PREPARED, protected.list_protected(PREPARED))[0]]


@pytest.mark.parametrize(
    "path",
    [
        *("tests.py", "tests.cpython-311-x86_64-linux-gnu.so", "tests/__init__.py", "tests/more.txt", "app/tests/x.py"),
        *("app/tests.so", "checks.py", "checks/__init__.py", "checks/check_calc/__init__.py", "checks/check_calc.pyc"),
        *(
            "testcalc/__init__.py",
            "testcalc.abi3.so",
            "conftest.py",
            "a/conftest/__init__.py",
            "calc.pyc",
            "__init__.py",
        ),
        *(
            "sitecustomize/__init__.py",
            "b/usercustomize.so",
            ".grader/x",
            "hidden/grader.py",
            "hidden/grader/__init__.py",
        ),
        *("hidden.py", "a/pytest.ini", "x.egg-link"),
    ],
)
def test_what_would_decide_which_tests_run_is_not_added(path: str) -> None:
    assert counted(path) == []


@pytest.mark.parametrize("path", ["app/tests.py", "checks/check_calc.py", "testcalc.py", "pkg/tests/test_a.py"])
def test_tests_stay_as_they_are(path: str) -> None:
    assert counted(changed=(path,)) == counted(deleted=(path,)) == []


@pytest.mark.parametrize("path", ["app/new.py", "app/deep/__init__.py", "json.py", "src/queue.py", "checks/data.txt"])
def test_other_files_may_be_added(path: str) -> None:
    assert counted(path) == [path]


@pytest.mark.parametrize("path", ["calc.py", "app/models.py", "app/forms.py", "app/__init__.py", "pkg/__init__.py"])
def test_code_may_be_changed(path: str) -> None:
    assert counted(changed=(path,)) == [path]


def test_the_task_may_allow_what_it_names() -> None:
    assert counted("tests/new.py", changed=("testcalc.py",), allowed=["tests/**", "testcalc.py"]) == [
        "tests/new.py",
        "testcalc.py",
    ]


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("python3 -m pytest -q checks/check_calc.py::test_a", ["checks/check_calc.py::test_a"]),
        ("python3 -m pytest -k calc --ignore calc.py checks", []),
        ("python3 -m pytest --doctest-modules calc.py", []),
        ("python3 -m unittest -q app.tests", ["unittest", "app.tests"]),
        ("python3 -m unittest -k calc app.tests", ["unittest", "app.tests"]),
        ("python3 run.py --settings app.forms app", ["run.py", "app"]),
    ],
)
def test_a_command_names_tests_and_the_program_that_runs_them(command: str, named: list[str]) -> None:
    assert list_named_tests(require_command(command, "command"), []) == named
