"""Draws functions of the package at random and prints their names and signatures, without docstrings and bodies: for
asking a reader who has not seen the code what each one does.

    python -m tools.draw_functions [--seed 22] [--count 30]
"""

import argparse
import ast
import random
from collections.abc import Iterator
from pathlib import Path

SEED = 22
ROOT = Path(__file__).resolve().parent.parent / "src"


def list_signatures(root: Path = ROOT) -> list[str]:
    """Of all functions and methods, but for those that Python itself calls by name."""
    return [signature for path in sorted(root.rglob("*.py")) for signature in _read_signatures(root, path)]


def _read_signatures(root: Path, path: Path) -> Iterator[str]:
    module = ".".join(path.relative_to(root).with_suffix("").parts)
    yield from _walk(ast.parse(path.read_text(encoding="utf-8")), module)


def _walk(node: ast.AST, prefix: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _walk(child, f"{prefix}.{child.name}")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not child.name.startswith("__"):
            child.body = [ast.Expr(ast.Constant(...))]
            yield f"{prefix}.{child.name}\n    " + ast.unparse(child).replace("\n", "\n    ")


def main() -> None:
    parser = argparse.ArgumentParser(description="Print names and signatures of functions that are drawn at random.")
    parser.add_argument("--seed", type=int, default=SEED, help="Draw by this seed.")
    parser.add_argument("--count", type=int, default=30, help="Draw so many.")
    options = parser.parse_args()
    print("\n".join(random.Random(options.seed).sample(list_signatures(), options.count)))


if __name__ == "__main__":
    main()
