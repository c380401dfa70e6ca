"""Ends with 0 if the code says what it should, however it is laid out. Nothing of the agent's is run."""

import ast
import sys
from pathlib import Path

wanted = Path(__file__).parent / "expected"
for file in sorted(wanted.rglob("*.py")):
    name = file.relative_to(wanted)
    try:
        found = ast.parse(Path(name).read_text())
    except (OSError, ValueError, SyntaxError) as error:
        sys.exit(f"{name} can't be read: {error}")
    said, meant = found, ast.parse(file.read_text())
    for tree in (said, meant):
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                node.names.sort(key=lambda one: one.name)
            if isinstance(node, ast.List) and all(isinstance(one, ast.Constant) for one in node.elts):
                node.elts.sort(key=lambda one: str(one.value))
    if ast.dump(said) != ast.dump(meant):
        sys.exit(f"{name} is not what it should be")
