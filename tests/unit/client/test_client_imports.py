"""A trainer's machine needs little for the client: no engine, server, tokenizer or array library is imported."""

import subprocess
import sys

ALLOWED = {
    "polar",
    "aiohttp", "aiohappyeyeballs", "aiosignal", "attr", "frozenlist", "idna", "multidict", "propcache", "yarl",
    "msgspec",
    "pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection",
}  # fmt: skip

PROGRAM = """
import sys
before = set(sys.modules)
import polar
assert {name for name in sys.modules if name.startswith("polar.")} == set()
client = polar.Client("http://127.0.0.1:1", patience=0)
try:
    client.submit({"task_id": "a", "instruction": "x"})
except polar.ClientError:
    pass
try:
    client.submit({"task_id": "a"})
except Exception as error:
    assert "instruction" in str(error), error
polar.AsyncClient("http://127.0.0.1:1")
names = {name.partition(".")[0] for name in set(sys.modules) - before}
own = {name for name in names if name.startswith(("_cython", "cython_runtime", "_sysconfigdata"))}  # of the above
print(*sorted(names - set(sys.stdlib_module_names) - own))
"""


def test_only_what_a_client_needs_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=300)
    assert set(done.stdout.split()) <= ALLOWED
