"""A matrix's settings."""

from pathlib import Path

import pytest

from polar.errors import ConfigError
from polar.matrix.matrix_run import load_matrix_settings

EXAMPLES = Path(__file__).parents[3] / "examples"
START = 'tasks = ["t"]\nharnesses = ["pi", "codex", "pi"]\n'


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "matrix.toml"
    file.write_text(text)
    return file


def test_each_model_has_an_engine_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POLAR_ENGINE__API_KEY", "secret")
    models = '[models.a]\nurls = "http://a"\n[models.b]\nkind = "openai"\nurls = "http://b"\napi_key = "own"\n'
    settings = load_matrix_settings(
        written(tmp_path, f"{START}{models}[polar.node]\nrun_workers = 3\n"), output="elsewhere"
    )
    assert settings.harnesses == ["pi", "codex"]
    assert settings.task_paths == [tmp_path / "t"]
    assert settings.output_folder == tmp_path / "elsewhere"
    a, b = settings.make_model_settings("a"), settings.make_model_settings("b")
    assert (a.engine.kind, a.engine.urls, a.engine.api_key) == ("vllm", ["http://a"], "secret")
    assert (b.engine.kind, b.engine.urls, b.engine.api_key) == ("openai", ["http://b"], "own")
    assert (a.node.run_workers, a.gateway.port) == (3, 0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (START, "models: it is missing"),
        (START + "[models]", "models: "),
        ('tasks = ["t"]\nharnesses = []\n[models.a]', "harnesses: "),
        (f"sample = 2\n{START}[models.a]", "sample: there is no such field"),
        (f'{START}[models."a/b"]', "models: 'a/b' is the name of a folder"),
        (f"{START}[models.a]\nurl = 1", "models.a.url: there is no such field"),
        ("tasks", "is not valid TOML"),
    ],
)
def test_settings_that_are_wrong(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_matrix_settings(written(tmp_path, text))


@pytest.mark.parametrize("name", ["swe/verified.toml", "terminal_bench/matrix.toml"])
def test_the_examples_are_settings(name: str) -> None:
    assert load_matrix_settings(EXAMPLES / name).harnesses == ["codex", "claude_code", "qwen_code", "pi"]
