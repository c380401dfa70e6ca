"""The contract of harness presets, kept by those of Polar: a class for each. `make test-harnesses` runs the real ones;
all else of them is checked without."""

import os
import shlex
import sys
from pathlib import Path

import pytest

from polar.plugins import list_names, load
from polar.testing import HarnessContract
from polar.testing.contract import requires
from tests.harnesses.bare import find_program

ASK_ONCE = """
import json, os, urllib.request
body = {"model": "m", "messages": [{"role": "user", "content": os.environ["POLAR_INSTRUCTION"]}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
print(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read())
"""


class TestShell(HarnessContract):
    plugin = load("harnesses", "shell")
    settings = {"command": f"{shlex.quote(sys.executable)} -c {shlex.quote(ASK_ONCE)}; : {{{{INSTRUCTION}}}}"}
    is_shell_command = True
    runs_here = True


class _Preset(HarnessContract):
    runs_here = True

    @pytest.mark.harnesses
    @requires("runs_here")
    def test_it_talks_to_the_gateway(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[override]
        """The program that `make harnesses` installed."""
        folder = find_program(self.plugin.name).parent
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        super().test_it_talks_to_the_gateway(tmp_path)


for _name in sorted(set(list_names("harnesses")) - {"shell"}):
    _contract = type(f"Test_{_name}", (_Preset,), {"plugin": load("harnesses", _name), "__module__": __name__})
    globals()[_contract.__name__] = _contract
