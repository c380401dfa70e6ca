"""The suites find what they are for: each faulty plug-in fails the tests that it should, and no others."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from polar import testing
from polar.testing.contract import _REQUIRED_ATTRIBUTE, Contract

FAULTY = '''
import json, random
from polar.bridges.bridge import AsyncBridge
from polar.errors import ConfigError
from polar.harnesses.base import HarnessSetup
from polar.harnesses.pi import Pi
from polar.evaluators.answer import Answer
from polar.dialects.openai_chat import OpenAIChat
from polar.export.trl import TrlExporter
from polar.records.session import Verdict
from polar.testing import *
from polar.testing.bridges import read_group
from polar.testing.exporters import ExportedTrace
from polar.testing.weight_sync import VllmWeightServer
from polar.trajectory.builders import per_request
from polar.weight_sync.vllm import VllmFileTransport


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


class TestMainOnly(BridgeContract):
    """Hands over the first trace of each session."""

    plugin = AsyncBridge

    async def take_groups(self, bridge, tasks):
        groups = await bridge.rollouts.run_groups(tasks, "step-1")
        return [[session[:1] for session in read_group(group)] for group in groups]


class Leaking(AsyncBridge):
    async def close(self):
        """Forgets its connections."""


class TestLeaking(BridgeContract):
    plugin = Leaking
    close_seconds = 0.1


class Believing(VllmFileTransport):
    """Takes its own word for what an engine has, and keeps every file."""

    async def load(self, engine, version):
        await super().load(engine, version)
        self.loaded = version

    async def read_version(self, engine):
        return getattr(self, "loaded", None)

    def release_previous(self, version):
        pass


class TestBelieving(WeightSyncContract):
    plugin = Believing

    def make_server(self):
        return VllmWeightServer()
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
    "TestMainOnly": {"test_the_trainer_is_handed_what_the_service_recorded"},
    "TestLeaking": {"test_closing_stops_what_it_started"},
    "TestBelieving": {
        "test_an_engine_that_lost_its_weights_is_seen",
        "test_failures_of_an_engine_are_engine_errors",
        "test_earlier_weights_do_not_pile_up",
        "test_closed_it_leaves_what_an_engine_needs_and_nothing_else",
    },
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


INAPPLICABLE: dict[tuple[type[Contract], str], set[str]] = {
    (testing.DialectContract, "has_tools"): {"test_calls_and_results_belong_together"},
    (testing.EngineContract, "accepts_token_ids"): {
        "test_ids_in_and_ids_out",
        "test_a_limit_is_kept_and_said",
        "test_the_same_prompt_has_the_same_reply",
        "test_a_prompt_that_no_context_holds",
    },
    (testing.EngineContract, "tells_context_length"): {"test_a_prompt_that_no_context_holds"},
    (testing.EngineContract, "can_freeze"): {"test_what_can_be_frozen_goes_on_when_it_is_thawed"},
    (testing.EngineContract, "can_sleep"): {"test_what_can_sleep_wakes_up_again"},
    (testing.EngineContract, "is_deterministic"): {"test_the_same_prompt_has_the_same_reply"},
    (testing.EvaluatorContract, "is_deterministic"): {"test_the_same_work_earns_the_same"},
    (testing.ExporterContract, "keeps_tokens"): {"test_what_it_wrote_are_the_recorded_traces"},
    (testing.HarnessContract, "runs_here"): {"test_it_talks_to_the_gateway"},
    (testing.RuntimeContract, "root"): {
        "test_links_that_it_left_lead_nowhere_at_a_restart",
        "test_what_can_not_be_started_any_more_says_that_it_is_spoiled",
        "test_mounted_folders_can_only_be_read",
        "test_home_and_workdir_are_the_same_in_every_runtime",
        "test_runtimes_do_not_see_each_other_nor_the_machine",
        "test_the_kernel_can_not_be_told_anything",
        "test_a_runtime_outlives_what_its_commands_do_to_it",
    },
    (testing.RuntimeContract, "network"): {
        "test_restarted_it_reaches_the_gateway",
        "test_the_gateway_is_reached_and_nothing_else",
        "test_without_a_network_there_is_not_even_the_gateway",
    },
    (testing.RuntimeContract, "memory"): {
        "test_restarted_it_has_its_limits",
        "test_a_command_that_takes_too_much_memory_says_so",
    },
    (testing.RuntimeContract, "processes"): {"test_restarted_it_has_its_limits", "test_processes_are_limited"},
    (testing.RuntimeContract, "disk"): {"test_a_full_disk_does_not_prevent_a_restart", "test_the_disk_is_limited"},
    (testing.RuntimeContract, "cpu"): {"test_cpu_time_is_limited"},
}
"""What a plug-in without a capability is not asked, by suite and capability."""


def declare(suite: type[Contract], **capabilities: bool) -> type[Contract]:
    """A plug-in's suite with just these capabilities; promises are those of runtimes."""
    declared: dict[str, Any] = capabilities
    if issubclass(suite, testing.RuntimeContract):
        declared = {"promises": frozenset(name for name, is_kept in capabilities.items() if is_kept)}
    return type("Declared", (suite,), {"plugin": object, **declared})


@pytest.mark.parametrize(("suite", "capability"), INAPPLICABLE, ids=str)
def test_a_capability_decides_which_tests_there_are(suite: type[Contract], capability: str) -> None:
    able = {name: True for kind, name in INAPPLICABLE if kind is suite}
    assert declare(suite, **able).list_inapplicable_tests() == []
    without = declare(suite, **{**able, capability: False})
    assert set(without.list_inapplicable_tests()) == INAPPLICABLE[suite, capability]
    assert declare(without, **able).list_inapplicable_tests() == []  # a class may have what its base lacks


def test_every_condition_is_known_here() -> None:
    """So that no test is left out because of a name that no plug-in declares."""
    suites = [getattr(testing, name) for name in testing.__all__ if name.endswith("Contract")]
    found = {
        (suite, capability)
        for suite in suites
        for test in suite._find_conditional_tests().values()
        for capability in getattr(test, _REQUIRED_ATTRIBUTE)
    }
    assert found == INAPPLICABLE.keys()


def test_there_is_a_suite_for_each_kind() -> None:
    for name in testing.__all__:
        assert getattr(testing, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        testing.nothing  # noqa: B018
