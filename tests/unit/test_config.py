"""Settings: where they come from, and what is said when they are wrong."""

from pathlib import Path

import pytest

from polar import config
from polar.errors import ConfigError


def test_the_environment_wins_over_the_file_and_the_command_line_over_both(tmp_path: Path) -> None:
    path = tmp_path / "polar.toml"
    path.write_text('[gateway]\nport = 1\nhost = "::1"\n[server]\nport = 2\n[engine]\nmodel = "m"\n')
    environment = {"POLAR_GATEWAY__PORT": "11", "POLAR_SERVER__PORT": "12", "POLAR_SESSION": "s", "OTHER": "x"}
    found = config.load(path, environment, {"server": {"port": 22}})
    assert (found.gateway.port, found.gateway.host, found.server.port, found.engine.model) == (11, "::1", 22, "m")


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("POLAR_ENGINE__URLS", '["http://a", "http://b"]', ["http://a", "http://b"]),
        ("POLAR_ENGINE__URLS", "http://a", ["http://a"]),
        ("POLAR_ENGINE__API_KEY", "12345", "12345"),
        ("POLAR_ENGINE__LOGPROBS", "false", False),
        ("POLAR_ENGINE__OPTIONS", '{"seed": 3}', {"seed": 3}),
    ],
)
def test_variables_are_read_by_the_type_of_their_setting(name: str, value: str, read: object) -> None:
    engine = config.load(None, {name: value}).engine
    assert getattr(engine, name.rpartition("__")[2].lower()) == read


def test_tables_within_a_section_are_reached_too() -> None:
    assert config.load(None, {"POLAR_ENGINE__SAMPLING__TEMPERATURE": "0.5"}).engine.sampling.temperature == 0.5


@pytest.mark.parametrize(
    ("variables", "overrides", "said"),
    [
        ({"POLAR_GATEWAY__PORT": "99999"}, {}, "the variable POLAR_GATEWAY__PORT: gateway.port"),
        (
            {"POLAR_GATWAY__PORT": "1"},
            {},
            "the variable POLAR_GATWAY__PORT: gatway: there is no such setting. Did you mean POLAR_GATEWAY__PORT?",
        ),
        ({"POLAR_ENGINE__SAMPLING__TOPP": "1"}, {}, "Did you mean POLAR_ENGINE__SAMPLING__TOP_P?"),
        ({"POLAR_SERVER__LEASE_SECOND": "1"}, {}, "Did you mean POLAR_SERVER__LEASE_SECONDS?"),
        (
            {"POLAR_NOTHING__LIKE_IT": "1"},
            {},
            "the variable POLAR_NOTHING__LIKE_IT: nothing: there is no such setting.$",
        ),
        ({"POLAR_ENGINE__URLS": "host:80"}, {}, "'host:80' is no address"),
        ({}, {"gateway": {"port": -1}}, "the command line: gateway.port"),
        (
            {"POLAR_ENGINE": "x"},
            {"engine": {"kidn": "vllm"}},
            "engine.kidn: there is no such setting. Did you mean engine.kind?",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_source(
    variables: dict[str, str], overrides: dict[str, dict[str, object]], said: str
) -> None:
    with pytest.raises(ConfigError, match=said.replace(".", r"\.").replace("?", r"\?")):
        config.load(None, variables, overrides)


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("POLAR_GATEWAY_PORT", "POLAR_GATEWAY__PORT"),
        ("POLAR_ENGIN_URLS", "POLAR_ENGINE__URLS"),
        ("POLAR_ENGINE_API_KEY", "POLAR_ENGINE__API_KEY"),
        ("POLAR_ENGINE_SAMPLING_TEMPERATURE", "POLAR_ENGINE__SAMPLING__TEMPERATURE"),
    ],
)
def test_a_misspelt_variable_is_named_with_the_setting_that_was_meant(
    variable: str, meant: str, caplog: pytest.LogCaptureFixture
) -> None:
    config._warn_if_misspelt.cache_clear()
    for _ in range(2):  # it is said once
        config.load(None, {variable: "x"})
    assert caplog.messages == [f"The variable {variable} is no setting and has no effect: did you mean {meant}?"]


def test_variables_that_are_no_settings_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    config._warn_if_misspelt.cache_clear()
    others = ("API_KEY", "BASE_URL", "SESSION", "INSTRUCTION", "NODE_TOKEN", "RUNTIME", "BRIDGE", "CONFIG", "ENGINE")
    config.load(None, {f"POLAR_{name}": "x" for name in others})
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"LEASE_SECONDS": "3"}, r"beat_seconds: 2 .* \(3\): set a smaller one, or lease_seconds to 6 or more"),
        ({"BEAT_SECONDS": "4"}, "POLAR_SERVER__BEAT_SECONDS: .* or lease_seconds to 12 or more"),
        ({"BEAT_SECONDS": "0.2", "LEASE_SECONDS": "0.5"}, "or lease_seconds to 0.6 or more"),
    ],
)
def test_nodes_beat_more_often_than_their_leases_end(variables: dict[str, str], said: str) -> None:
    environment = {f"POLAR_SERVER__{name}": value for name, value in variables.items()}
    with pytest.raises(ConfigError, match=said):
        config.load(None, environment)


@pytest.mark.parametrize(("beat", "lease"), [("0.1", "0.3"), ("2", "6"), ("1", "60")])
def test_a_third_of_a_lease_is_often_enough(beat: str, lease: str) -> None:
    found = config.load(None, {"POLAR_SERVER__BEAT_SECONDS": beat, "POLAR_SERVER__LEASE_SECONDS": lease})
    assert found.server.beat_seconds == float(beat)


def test_a_file_that_can_not_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing"):
        config.load(tmp_path / "missing.toml", {})
    (tmp_path / "bad.toml").write_text("[engine")
    with pytest.raises(ConfigError, match="not valid TOML"):
        config.load(tmp_path / "bad.toml", {})
    (tmp_path / "odd.toml").write_text("[engine]\nkidn = 1")
    with pytest.raises(ConfigError, match=r"odd\.toml: engine\.kidn: .* Did you mean engine\.kind\?"):
        config.load(tmp_path / "odd.toml", {})
    (tmp_path / "other.toml").write_text("[gatway]\nport = 1")
    with pytest.raises(ConfigError, match=r"other\.toml: gatway: .* Did you mean gateway\?"):
        config.load(tmp_path / "other.toml", {})


def test_without_a_name_the_engine_is_the_one_that_brings_a_model_along() -> None:
    assert config.load(None, {}).engine.kind == "embedded"
    assert config.load(None, {"POLAR_ENGINE__URLS": "[]"}).engine.kind == "vllm"  # a trainer adds its own
    assert config.load(None, {"POLAR_ENGINE__KIND": "scripted"}).engine.kind == "scripted"
    assert config.load(None, {"POLAR_ENGINE__OPTIONS": '{"device": "cpu"}'}).engine.kind == "embedded"
