"""Small agents for the harness `shell`: Python programs that ask the gateway, as any harness does."""

import shlex
import sys
from typing import Any

from polar.records.task import TaskRequest

ASK = """
import json, os, sys, time, urllib.request, urllib.error
def ask(text="go on", **more):
    body = {"model": "m", "messages": [{"role": "user", "content": text}], **more}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""


def command(code: str, python: str = sys.executable) -> str:
    """A command line that runs an agent; `ask(text)` is there for it."""
    return f"{shlex.quote(python)} -c {shlex.quote(ASK + code)}"


def task(code: str, **fields: Any) -> TaskRequest:
    """A task whose agent is that program, in the runtime `local` unless `runtime` says otherwise."""
    document = {
        "task_id": "a-task",
        "instruction": "do it",
        "timeout_seconds": 600,
        "runtime": {"backend": "local"},
        "agent": {"harness": "shell", "custom_shell": {"command": command(code)}},
        **fields,
    }
    return TaskRequest.model_validate(document)
