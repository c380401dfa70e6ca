"""Which headers are recorded."""

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from polar.gateway import auth
from polar.harnesses import find_call_patterns


@pytest.mark.parametrize(
    "name",
    [
        "Authorization",
        "Proxy-Authorization",
        "Cookie",
        "api-key",
        "x-api-key",
        "x-goog-api-key",
        "x-litellm-api-key",
        "Helicone-Auth",
        "cf-aig-authorization",
        "x-portkey-api-key",
        "x-amz-security-token",
        "x-proxy-password",
        "x-some-secret",
        "x-apikey",
    ],
)
def test_credentials_are_not_recorded(name: str) -> None:
    headers = CIMultiDictProxy(CIMultiDict({name: "hunter2", "x-session-id": "s"}))
    assert auth.collect_hints(headers) == {"x-session-id": "s"}


@pytest.mark.parametrize(
    "value",
    [
        "Bearer hunter2",
        "basic aHVudGVyMg==",
        "sk-ant-api03-0123456789abcdef",
        "xsk-polar-pFgtLLAOyCQUX6U6HbJoxGknlpCdSqve",
        "sk-polar-x",
    ],
)
def test_values_that_look_like_credentials_are_not_recorded(value: str) -> None:
    assert auth.collect_hints(CIMultiDictProxy(CIMultiDict({"x-upstream": value}))) == {}


@pytest.mark.parametrize("harness", ["claude_code", "codex", "opencode"])
def test_what_harnesses_say_of_themselves_is_recorded(harness: str) -> None:
    known = find_call_patterns(harness)
    names = {
        *known.agent_headers,
        *known.subagent_headers,
        *(mark.header for mark in known.role_patterns if mark.header),
    }
    headers = CIMultiDict(dict.fromkeys(names, "task-0123456789abcdefgh"))
    assert names
    assert set(auth.collect_hints(CIMultiDictProxy(headers))) == names
