"""What Polar relies on: its contract suites, and what they ask to be told of each plug-in."""

import json
from collections.abc import Iterable

from polar_example_plugin.evaluator import Keywords
from polar_example_plugin.exporter import IGNORED_LABEL, AdvantageExporter
from polar_example_plugin.harness import Oneshot
from polar_example_plugin.runtime import TemplateBackend

from polar.testing import AgentRun, EvaluatorContract, ExporterContract, HarnessContract, RuntimeContract
from polar.testing.exporters import ExportedTrace


class TestOneshot(HarnessContract):
    plugin = Oneshot
    runs_here = True


class TestKeywords(EvaluatorContract):
    plugin = Keywords
    config = {"words": ["hello", "teal"]}
    files = {"answer.txt": "nothing yet"}
    solved = AgentRun("echo 'Hello, teal!' > answer.txt")
    failed = AgentRun("echo 'Hello, red!' > answer.txt")


class TestTemplate(RuntimeContract):
    plugin = TemplateBackend
    promises = frozenset()  # as `local`: no walls, and limits only where cgroups can be made
    parallel_runtimes = 4


class TestAdvantages(ExporterContract):
    plugin = AdvantageExporter

    def read(self, data: bytes) -> Iterable[ExportedTrace]:
        for line in data.splitlines():
            row = json.loads(line)
            trains = [label != IGNORED_LABEL for label in row["labels"]]
            yield ExportedTrace.make(row["input_ids"], trains, row["logprobs"], row["reward"])
