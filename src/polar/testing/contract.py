"""What all contract suites share.

A suite declares what a plug-in may or may not be able to do in class variables (capabilities), and tests that need one
say so with `requires`. A plug-in without the capability does not have these tests: they are not collected, so a skipped
test always means that something is missing on the machine.
"""

import inspect
from collections.abc import Callable
from typing import Any, ClassVar, Final, TypeVar

import pytest

from polar.plugins import PluginKind, find_shape_problem

Test = TypeVar("Test", bound=Callable[..., Any])

_REQUIRED_ATTRIBUTE: Final = "_polar_required_capabilities"
_NOT_APPLICABLE: Final = object()
"""In the place of a test that does not apply. pytest does not collect it, since it can't be called."""


def requires(*capabilities: str) -> Callable[[Test], Test]:
    """Marks a test for plug-ins that have all of these capabilities (`Contract.has_capability`)."""

    def mark(test: Test) -> Test:
        setattr(test, _REQUIRED_ATTRIBUTE, capabilities)
        return test

    return mark


class Contract:
    """The base of a suite. A subclass named `Test...` names the plug-in, the object that its entry point names:

    class TestMine(polar.testing.EvaluatorContract):
        plugin = Mine
    """

    kind: ClassVar[PluginKind]
    plugin: ClassVar[Any]

    def __init_subclass__(cls, **options: Any) -> None:
        """Coroutine tests run under pytest-asyncio in whatever mode the project has it. A plug-in that is a function
        stays one: it is no method of the suite. Tests that do not apply to the plug-in are left out."""
        super().__init_subclass__(**options)
        if inspect.isfunction(plugin := vars(cls).get("plugin")):
            cls.plugin = staticmethod(plugin)
        for name, member in list(vars(cls).items()):
            if name.startswith("test_") and inspect.iscoroutinefunction(member):
                setattr(cls, name, pytest.mark.asyncio(member))
        if hasattr(cls, "plugin"):
            for name, test in cls._find_conditional_tests().items():
                applies = all(map(cls.has_capability, getattr(test, _REQUIRED_ATTRIBUTE)))
                setattr(cls, name, test if applies else _NOT_APPLICABLE)

    @classmethod
    def has_capability(cls, name: str) -> bool:
        """By default a class variable of that name."""
        return bool(getattr(cls, name))

    @classmethod
    def list_inapplicable_tests(cls) -> list[str]:
        """The tests that this plug-in does not have, by name."""
        return [name for name in dir(cls) if getattr(cls, name) is _NOT_APPLICABLE]

    @classmethod
    def _find_conditional_tests(cls) -> dict[str, Any]:
        """Tests that require something, each as the nearest class defines it. A class may have what its base lacks."""
        tests: dict[str, Any] = {}
        for base in reversed(cls.__mro__):
            tests |= {
                name: member
                for name, member in vars(base).items()
                if name.startswith("test_") and member is not _NOT_APPLICABLE
            }
        return {name: test for name, test in tests.items() if hasattr(test, _REQUIRED_ATTRIBUTE)}

    def test_it_has_the_shape_of_its_kind(self) -> None:
        assert find_shape_problem(self.kind, self.plugin) is None


def assert_helpful(error: BaseException) -> None:
    """An error says in a sentence what is wrong, so that whoever reads it can act on it."""
    assert len(str(error).split()) >= 3, f"{type(error).__name__} says only {str(error)!r}"
