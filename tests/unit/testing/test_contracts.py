"""The suites find what they are for: each faulty plug-in fails the tests that it should, and no others."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from polar import testing

FAULTY = '''
import json, random
from polar.errors import ConfigError
from polar.harnesses.base import HarnessSetup
from polar.harnesses.pi import Pi
from polar.evaluators.answer import Answer
from polar.dialects.openai_chat import OpenAIChat
from polar.export.trl import TrlExporter
from polar.records.session import Verdict
from polar.testing import *
from polar.testing.exporters import ExportedTrace
from polar.trajectory.builders import per_request


class KeyInFile(Pi):
    def setup(self, request):
        setup = super().setup(request)
        return HarnessSetup(setup.files | {".env": request.key}, setup.env)


class TestKeyInFile(HarnessContract):
    plugin = KeyInFile


class Crashing(Answer):
    """Does not expect that the file may be gone."""

    async def evaluate(self, work):
        await work.agent_runtime.get("/workspace/answer.txt", work.scratch / "answer")
        return Verdict(float("teal" in (work.scratch / "answer").read_text(errors="replace")))


class TestCrashing(EvaluatorContract):
    plugin = Crashing
    config = {"expected": "teal"}
    files = {"answer.txt": "?"}
    solved = AgentRun("echo teal > answer.txt")
    failed = AgentRun("echo red > answer.txt")


class Rounding(TrlExporter):
    def build_row(self, item, index, trace):
        row = super().build_row(item, index, trace)
        return row | {"logprobs": row["logprobs"] and [round(value, 2) for value in row["logprobs"]]}


class TestRounding(ExporterContract):
    plugin = Rounding

    def read(self, data):
        for row in map(json.loads, data.splitlines()):
            zeros = [0] * len(row["prompt_ids"])
            logprobs = None if row["logprobs"] is None else zeros + row["logprobs"]
            tokens = row["prompt_ids"] + row["completion_ids"]
            yield ExportedTrace.make(tokens, zeros + row["env_mask"], logprobs, row["reward"])


def forgetful(session):
    """Leaves the last trace out."""
    built = per_request(session)
    built.traces = built.traces[:-1]
    return built


class TestForgetful(BuilderContract):
    plugin = forgetful


class Careless(OpenAIChat):
    def decode_request(self, raw_request, params):
        json.loads(bytes(raw_request.fields["model"])).upper()
        return super().decode_request(raw_request, params)


class TestCareless(DialectContract):
    plugin = Careless
'''

CONFTEST = """
from hypothesis import Phase, settings

settings.register_profile("quick", phases=[Phase.generate], max_examples=20, derandomize=True)
settings.load_profile("quick")
"""

EXPECTED = {
    "TestKeyInFile": {"test_the_key_is_in_no_file_and_nothing_is_of_this_machine"},
    "TestCrashing": {"test_nothing_that_an_agent_leaves_excuses_it"},
    "TestRounding": {"test_what_it_wrote_are_the_recorded_traces"},
    "TestForgetful": {
        "test_it_trains_exactly_what_was_sampled",
        "test_each_sampled_token_is_trained_once_or_excluded",
        "test_weights_and_counts",
        "test_a_trainer_accepts_it",
    },
    "TestCareless": {"test_whatever_else_is_wrong_is_an_api_error"},
}


def test_faults_are_found(tmp_path: Path) -> None:
    (tmp_path / "test_faulty.py").write_text(FAULTY)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--tb=no", "-rf", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    found: dict[str, set[str]] = {}
    for name, test in re.findall(r"^FAILED test_faulty\.py::(\w+)::(\w+)", done.stdout, re.MULTILINE):
        found.setdefault(name, set()).add(test)
    assert found == EXPECTED, done.stdout + done.stderr


def test_there_is_a_suite_for_each_kind() -> None:
    for name in testing.__all__:
        assert getattr(testing, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        testing.nothing  # noqa: B018
