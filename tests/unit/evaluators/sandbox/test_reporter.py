"""reporter.py and tests that are given up: by their author, which is fine, or by the code that they test."""

import ast
import re
import sys

import pytest

from polar.evaluators import project_tests as evaluator
from polar.evaluators import signed_run
from polar.testing.grading import WorkFactory
from tests.selection import leave_to_slow

FIX = "sed -i 's/a - b/a + b/' calc.py"
CALC = "def add(a, b):\n    return a - b\n"
PYTEST = {
    "calc.py": CALC,
    "tests/conftest.py": (
        "import pytest\n\n@pytest.fixture\ndef missing():\n    pytest.skip('no such machine')\n\n"
        "@pytest.fixture\ndef broken():\n    pytest.xfail('known')\n"
    ),
    "tests/helpers.py": "import pytest\n\ndef give_up():\n    pytest.xfail('known')\n",
    "tests/test_calc.py": (
        "import pytest\nfrom calc import add\nfrom helpers import give_up\n\n"
        "def test_add():\n    assert add(1, 2) == 3\n\n"
        "@pytest.mark.xfail\ndef test_marked():\n    assert False\n\n"
        "def test_said():\n    pytest.xfail('known')\n\n"
        "def test_helped():\n    give_up()\n\n"
        "def test_set_up(broken):\n    pass\n\n"
        "def test_skipped(missing):\n    pass\n"
    ),
    "tests/test_elsewhere.py": "import pytest\npytest.importorskip('no_such_module')\n",
}
UNITTEST = {
    "calc.py": CALC,
    "test_calc.py": (
        "import unittest\nfrom calc import add\n\n"
        "class CalcTest(unittest.TestCase):\n"
        "    def test_add(self): self.assertEqual(add(1, 2), 3)\n"
        "    @unittest.skip('not now')\n    def test_skipped(self): self.fail()\n"
        "    @unittest.expectedFailure\n    def test_expected(self): self.fail()\n"
        "    def test_said(self): self.skipTest('not here')\n"
    ),
}


async def reward(place: WorkFactory, agent: str, files: dict[str, str], command: str) -> float | None:
    work = await place.create_work(agent, files=files)
    config = {"command": f"{sys.executable} -m {command}", "env": {"PYTHONPATH": "."}}
    return (await evaluator.ProjectTests(config).evaluate(work)).reward


async def test_tests_may_give_themselves_up(place: WorkFactory) -> None:
    assert await reward(place, FIX, PYTEST, "pytest tests") == 1
    assert await reward(place, "", PYTEST, "pytest tests") == 0


@pytest.mark.skipif(sys.version_info < (3, 11), reason="before, unittest does not tell who skips a test")
async def test_those_of_unittest_too(place: WorkFactory) -> None:
    own = {"test_elsewhere.py": "import unittest\nraise unittest.SkipTest('not here')\n"}
    assert await reward(place, FIX, UNITTEST | own, "unittest discover") == 1
    assert await reward(place, "", UNITTEST, "unittest test_calc") == 0


GIVES_UP = [
    "import pytest\ndef add(a, b): pytest.xfail('x')",
    "import pytest\ndef add(a, b): pytest.skip('x')",
    "import pytest\npytest.skip('x', allow_module_level=True)",
    "import unittest\ndef add(a, b): raise unittest.SkipTest('x')",
    "import unittest\nraise unittest.SkipTest('x')",
    "import builtins, pytest\nbuiltins.AssertionError = pytest.xfail.Exception\ndef add(a, b): return 0",
]


@pytest.mark.parametrize("calc", leave_to_slow(GIVES_UP, but=[GIVES_UP[0], GIVES_UP[-1]]))
async def test_code_can_not_give_up_its_tests(place: WorkFactory, calc: str) -> None:
    assert await reward(place, f"cat > calc.py <<'END'\n{calc}\nEND", PYTEST, "pytest tests") == 0


GIVES_UP_UNITTEST = [
    "import unittest\ndef add(a, b): raise unittest.SkipTest('x')",
    "import unittest\nraise unittest.SkipTest('x')",
    "import unittest\nunittest.TestCase.assertEqual = lambda *a, **k: None\ndef add(a, b): return 0",
    "import unittest\nunittest.TestCase.failureException = unittest.SkipTest\ndef add(a, b): return 0",
    "import unittest\nunittest.TestCase.__getattribute__ = lambda s, n: print\ndef add(a, b): return 0",
]


@pytest.mark.parametrize("calc", leave_to_slow(GIVES_UP_UNITTEST, but=[GIVES_UP_UNITTEST[0]]))
async def test_nor_those_of_unittest(place: WorkFactory, calc: str) -> None:
    files = {**UNITTEST, "test_sane.py": "import unittest\nclass T(unittest.TestCase):\n    def test_it(self): pass\n"}
    agent = f"cat > calc.py <<'END'\n{calc}\nEND"
    assert await reward(place, agent, files, "unittest discover") == 0


@pytest.mark.parametrize("name", signed_run.UPLOADED_SCRIPTS)
def test_what_is_uploaded_is_written_for_older_pythons(name: str) -> None:
    """Images have a Python of their own; grading in two processes takes 3.8, the rest 3.6."""
    source = (signed_run.SCRIPTS_FOLDER / name).read_text()
    ast.parse(source, feature_version=(3, 8) if "remote" in name else (3, 6))
    imported = set(re.findall(r"^(?:import|from) (\w+)", source, re.MULTILINE))
    assert imported <= sys.stdlib_module_names
