"""Contract suites for plug-ins, and fixtures for tests of agents (extra `testing`; docs/plugins.md).

    class TestMine(polar.testing.RuntimeContract):        # in a test module of the plug-in's own package
        plugin = Mine

    pytest_plugins = ["polar.testing.fixtures"]           # in conftest.py: scripted_engine, polar_gateway

A suite checks what the core relies on: shapes, errors of the right type with a sentence, cleaning up, cancellation,
determinism, round trips. Polar's own plug-ins pass the same suites. Bridges and weight sync have no suite yet.

Only this package depends on pytest, and nothing else in Polar imports it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from polar.testing.builders import BuilderContract
    from polar.testing.dialects import DialectContract
    from polar.testing.engines import EngineContract
    from polar.testing.evaluators import AgentRun, EvaluatorContract
    from polar.testing.exporters import ExporterContract
    from polar.testing.harnesses import HarnessContract
    from polar.testing.runtimes import RuntimeContract

__all__ = [
    "AgentRun",
    "BuilderContract",
    "DialectContract",
    "EngineContract",
    "EvaluatorContract",
    "ExporterContract",
    "HarnessContract",
    "RuntimeContract",
]

_MODULES = {
    "AgentRun": "polar.testing.evaluators",
    "BuilderContract": "polar.testing.builders",
    "DialectContract": "polar.testing.dialects",
    "EngineContract": "polar.testing.engines",
    "EvaluatorContract": "polar.testing.evaluators",
    "ExporterContract": "polar.testing.exporters",
    "HarnessContract": "polar.testing.harnesses",
    "RuntimeContract": "polar.testing.runtimes",
}

pytest.register_assert_rewrite(*sorted({*_MODULES.values(), "polar.testing.contract"}))  # failures say what was found


def __getattr__(name: str) -> Any:
    """A suite is imported when it is named: each imports what its kind needs."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
