"""A small agent, so that `make bench-fidelity` runs where no harness is installed: `python agent.py TASK`.

It does what most harnesses do: sends the whole conversation with every call, echoes the model's turns with their
thinking and with arguments that it has written anew as JSON, runs shell commands, and asks again where a connection
broke before a reply came. It speaks Chat and knows nothing of Polar.
"""

import json
import os
import subprocess
import sys
import time
import urllib.request
from http.client import HTTPException
from typing import Any

_TRIES = 4
_SYSTEM = "You are an agent. Work step by step with the shell, and say so when you are done."
_SHELL = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


def main(task: str) -> None:
    messages: list[dict[str, Any]] = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": task}]
    while True:
        turn = _ask(messages)
        calls = turn.get("tool_calls") or []
        for call in calls:
            call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), sort_keys=True)
        messages.append(turn)
        if not calls:
            return
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": _run(call)} for call in calls]


def _ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "tools": [_SHELL]}
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    for attempt in range(_TRIES):
        try:
            with urllib.request.urlopen(request) as answer:
                turn: dict[str, Any] = json.load(answer)["choices"][0]["message"]
                return turn
        except (OSError, HTTPException):
            if attempt == _TRIES - 1:
                raise
            time.sleep(0.2)
    raise AssertionError


def _run(call: dict[str, Any]) -> str:
    command = json.loads(call["function"]["arguments"])["command"]
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


if __name__ == "__main__":
    main(sys.argv[1])
