"""Where the examples' graders find their work."""

from tests.unit.evaluators.conftest import place, sandbox

__all__ = ["place", "sandbox"]
