"""docs/client.md names methods and parameters that the client has."""

import inspect
import re
from pathlib import Path

import polar

PAGE = (Path(__file__).parents[2] / "docs" / "client.md").read_text(encoding="utf-8")


def test_methods_and_their_parameters() -> None:
    calls = re.findall(r"`(\w+)\(([^`]*)\)`", "\n".join(re.findall(r"^\| (`.+?) \| ", PAGE, re.MULTILINE)))
    assert len(calls) > 15
    for name, arguments in calls:
        method = getattr(polar.AsyncClient, name, None)
        assert method is not None, f"polar.Client has no {name}"
        parameters = inspect.signature(method).parameters
        for argument in filter(None, re.split(r", *", arguments)):
            named = argument.partition("=")[0]
            assert named in parameters or named == "...", f"{name} has no parameter {named}"


def test_every_method_is_told_of() -> None:
    public = [name for name in vars(polar.AsyncClient) if not name.startswith("_") and name not in ("close", "run")]
    for name in public:
        assert re.search(rf"\b{name}\(", PAGE), name
