"""What commands say of themselves."""

from pathlib import Path

from polar.cli.common import describe_default_engine, format_show_command
from polar.config import EngineSettings, Settings


def test_the_scripted_engine_is_named_where_nobody_chose_it() -> None:
    assert "the scripted engine answered" in (describe_default_engine(Settings()) or "")
    assert describe_default_engine(Settings(engine=EngineSettings(options={"play": "right.toml"}))) is None
    assert describe_default_engine(Settings(engine=EngineSettings(kind="vllm", urls=["http://a:1"]))) is None


def test_only_a_data_folder_that_is_not_the_usual_one_is_named() -> None:
    assert format_show_command("s1", Path(".polar")) == "polar show s1"
    assert format_show_command("s1", Path("my data")) == "polar show s1 --data 'my data'"
