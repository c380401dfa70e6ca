"""The process's log: its two forms, whose line each is, and that no secret is in it."""

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from polar.config import Settings
from polar.telemetry import logs
from polar.telemetry.logs import bind
from polar.telemetry.redaction import SecretRedactor, collect_secrets

log = logging.getLogger("polar.test")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers = handlers
    root.setLevel(level)


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_text_is_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure()
    log.info("not told")
    log.warning("told %d times", 3)
    assert capsys.readouterr().err == "WARNING polar.test: told 3 times\n"


def test_json_is_an_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    others = set(logging.getLogger().handlers)
    logs.configure("json", "debug")
    (handler,) = set(logging.getLogger().handlers) - others
    # To ours alone: what pytest keeps of a log must be text that can be sent.
    handler.handle(logging.LogRecord("polar.test", logging.DEBUG, "", 0, "two\nlines, and \udcff", None, None))
    try:
        raise ValueError("broken")
    except ValueError:
        log.exception("failed")
    first, second = lines(capsys)
    assert first["message"] == "two\nlines, and \\udcff"
    assert (first["level"], first["logger"]) == ("debug", "polar.test")
    assert first["time"].endswith("+00:00")
    assert set(first) == {"time", "level", "logger", "message"}
    assert second["exception"].endswith("ValueError: broken")


def test_started_again_it_takes_the_place_of_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("json")
    logs.configure("json", "error")
    log.warning("not told any more")
    log.error("once")
    assert [line["message"] for line in lines(capsys)] == ["once"]


async def test_lines_say_whose_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("json")

    async def deeper() -> None:
        log.warning("inherited")

    async def session(name: str) -> None:
        bind(session_id=name, run="r")
        await asyncio.sleep(0)
        log.warning("bound")
        await asyncio.create_task(deeper())
        bind(exchange_id=f"x-{name}")
        log.warning("more")

    await asyncio.gather(session("s1"), session("s2"))
    log.warning("nobody's")
    told = lines(capsys)
    for name in ("s1", "s2"):
        own = [line for line in told if line.get("session_id") == name]
        assert [line["message"] for line in own] == ["bound", "inherited", "more"]
        assert [line.get("exchange_id") for line in own] == [None, None, f"x-{name}"]
        assert {line["run"] for line in own} == {"r"}
    assert set(told[-1]) == {"time", "level", "logger", "message"}


SECRETS = {
    "engine": {"api_key": "engine-key-1", "urls": ["http://me:in-a-url@127.0.0.1:1"]},
    "server": {"token": "admin-token-1"},
    "store": {"url": "postgresql://polar:p%40ss-word@127.0.0.1/polar?sslpassword=for-the-key"},
    "judges": {"one": {"url": "http://127.0.0.1:2", "model": "m", "api_key": "judge-key-1"}},
}
HIDDEN = {"engine-key-1", "in-a-url", "admin-token-1", "p%40ss-word", "p@ss-word", "for-the-key", "judge-key-1"}


def test_the_settings_secrets_are_found() -> None:
    assert collect_secrets(Settings.model_validate(SECRETS)) == HIDDEN
    assert collect_secrets(Settings()) == set()


@pytest.mark.parametrize("form", ["text", "json"])
def test_secrets_are_put_out_of_every_line(form: logs.LogFormat, capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(form, "debug", collect_secrets(Settings.model_validate(SECRETS)))
    key = "sk-polar-Ab_9-xyz"
    for secret in (*HIDDEN, key):
        log.debug("GET /s/%s/v1?key=%s", secret, secret)
        try:
            raise ValueError(f"Bearer {secret}")
        except ValueError:
            log.exception("failed")
    told = capsys.readouterr().err
    assert told.count("(secret)") >= 3 * (len(HIDDEN) + 1)
    for secret in (*HIDDEN, key):
        assert secret not in told


def test_a_secret_that_begins_with_another_is_hidden_whole() -> None:
    assert SecretRedactor({"token", "token-and-more"})("a token-and-more, a token") == "a (secret), a (secret)"
    assert SecretRedactor()("nothing to hide") == "nothing to hide"


def test_what_is_too_short_hides_nothing() -> None:
    assert collect_secrets(Settings.model_validate({"server": {"token": "a"}})) == set()
