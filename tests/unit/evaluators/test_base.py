"""What is said of an evaluator's config that can't be used: the field, and what it must be, in plain words."""

from typing import Any

import pytest

from polar.errors import ConfigError
from polar.evaluators.answer import AnswerConfig
from polar.evaluators.base import parse_config
from polar.evaluators.command import CommandConfig
from polar.evaluators.weighted import WeightedConfig
from polar.records.task import RequestModel

RIGHT = {"command": "true"}


@pytest.mark.parametrize(
    ("model", "config", "said"),
    [
        (CommandConfig, {"comand": "true"}, "config.comand: there is no such field."),  # before: `command` is missing
        (CommandConfig, {"max_mb": "x", "timeouts": 1} | RIGHT, "config.timeouts: there is no such field."),
        (CommandConfig, {}, "config.command: it must be given."),
        (CommandConfig, {"command": 5}, "config.command: it must be text, or a list of words."),
        (CommandConfig, {"command": ["a", 1]}, "config.command: it must be text, or a list of words."),
        (CommandConfig, {"command": []}, "config.command: it is empty."),
        (CommandConfig, {"timeout": "soon"} | RIGHT, "config.timeout: it must be a number."),
        (CommandConfig, {"timeout_seconds": 0} | RIGHT, "config.timeout_seconds: it must be greater than 0."),
        (CommandConfig, {"max_mb": 1.5} | RIGHT, "config.max_mb: it must be a whole number."),
        (CommandConfig, {"artifacts": "x"} | RIGHT, "config.artifacts: it must be a list."),
        (CommandConfig, {"env": {"A": 1}} | RIGHT, "config.env.A: it must be text."),
        (CommandConfig, {"env": {"str": 1}} | RIGHT, "config.env.str: it must be text."),
        (CommandConfig, {"files": ["x"]} | RIGHT, "config.files.0: it must be a table."),
        (CommandConfig, {"files": [{}]} | RIGHT, "config.files.0: its `type` is missing: upload_file or upload_dir."),
        (
            CommandConfig,
            {"files": [{"type": "exec"}]} | RIGHT,
            "config.files.0: its `type` must be upload_file or upload_dir.",
        ),
        (
            CommandConfig,
            {"files": [{"type": "upload_dir", "source": "x"}]} | RIGHT,
            "config.files.0.target: it must be given.",
        ),
        (
            CommandConfig,
            {"reward_file": "x", "expected_output_json": {}} | RIGHT,
            "config: it takes either `reward_file` or `expected_output_json`.",
        ),
        (AnswerConfig, {"expected": []}, "config.expected: it is empty."),
        (AnswerConfig, {"expected": "x", "tolerance": -1}, "config.tolerance: it must be 0 or more."),
        (AnswerConfig, {"expected": "x", "tolerance": "inf"}, "config.tolerance: it must be a finite number."),
        (
            AnswerConfig,
            {"expected": "x", "match": "close"},
            "config.match: it must be 'exact', 'normalized', 'contains', 'regex' or 'number'.",
        ),
        (WeightedConfig, {"parts": [1]}, "config.parts.0: it must be a table."),
        (
            WeightedConfig,
            {"parts": [{"strategy": "x", "required": "maybe"}]},
            "config.parts.0.required: it must be true or false.",
        ),
    ],
)
def test_the_field_is_named_and_what_it_must_be(model: type[RequestModel], config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_config(model, config)
    assert str(raised.value) == said
