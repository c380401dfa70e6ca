"""Code in docs/plugins.md and in the example's README: taken from the example, or run here.

```python PATH      stands in that file, word for word
```python           a test module, named in its first line: run with the fixtures of polar.testing
```sh               run in the example's folder
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / "plugins.md", ROOT / "examples" / "plugin" / "README.md"]
BLOCKS = [
    (page, *match)
    for page in PAGES
    for match in re.findall(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
]
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider")
CONFTEST = """
from hypothesis import settings

pytest_plugins = ["polar.testing.fixtures"]
settings.register_profile("quick", max_examples=20, derandomize=True)
settings.load_profile("quick")
"""


def test_what_is_taken_from_the_example_stands_there() -> None:
    taken = [(path, text) for _, _, path, text in BLOCKS if path]
    assert len(taken) > 8
    for path, text in taken:
        assert text in (ROOT / path).read_text(), path


def test_modules_pass_as_they_stand(tmp_path: Path) -> None:
    modules = [text for _, language, path, text in BLOCKS if language == "python" and not path]
    for text in modules:
        name = re.match(r"# (test_\w+\.py)\n", text)
        assert name is not None, text
        (tmp_path / name[1]).write_text(text)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run([*PYTEST, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_commands_are_those_that_the_examples_tests_run() -> None:
    """test_example_plugin.py runs the README's, in an environment of their own."""
    documented, readmes = (
        [text for where, language, _, text in BLOCKS if (where, language) == (page, "sh")] for page in PAGES
    )
    assert documented == readmes != []
    assert {language for _, language, _, _ in BLOCKS} == {"python", "sh", "toml"}
    assert all(path for _, language, path, _ in BLOCKS if language == "toml")
