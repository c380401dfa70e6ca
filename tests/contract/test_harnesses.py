"""The contract of harness presets, kept by those of Polar: a class for each. `make test-harnesses` runs them."""

import shlex
import sys

from polar.plugins import list_names, load
from polar.testing import HarnessContract

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


for _name in sorted(set(list_names("harnesses")) - {"shell"}):
    _contract = type(f"Test_{_name}", (HarnessContract,), {"plugin": load("harnesses", _name), "__module__": __name__})
    globals()[_contract.__name__] = _contract
