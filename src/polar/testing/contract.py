"""What all contract suites share."""

import inspect
from typing import Any, ClassVar

import pytest

from polar.plugins import PluginKind, find_shape_problem


class Contract:
    """The base of a suite. A subclass named `Test...` names the plug-in, the object that its entry point names:

    class TestMine(polar.testing.EvaluatorContract):
        plugin = Mine
    """

    kind: ClassVar[PluginKind]
    plugin: ClassVar[Any]

    def __init_subclass__(cls, **options: Any) -> None:
        """Coroutine tests run under pytest-asyncio in whatever mode the project has it. A plug-in that is a function
        stays one: it is no method of the suite."""
        super().__init_subclass__(**options)
        if inspect.isfunction(plugin := vars(cls).get("plugin")):
            cls.plugin = staticmethod(plugin)
        for name, member in list(vars(cls).items()):
            if name.startswith("test_") and inspect.iscoroutinefunction(member):
                setattr(cls, name, pytest.mark.asyncio(member))

    def test_it_has_the_shape_of_its_kind(self) -> None:
        assert find_shape_problem(self.kind, self.plugin) is None


def assert_helpful(error: BaseException) -> None:
    """An error says in a sentence what is wrong, so that whoever reads it can act on it."""
    assert len(str(error).split()) >= 3, f"{type(error).__name__} says only {str(error)!r}"
