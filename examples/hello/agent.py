"""The smallest agent with a tool: it asks a model, runs the shell commands that the model calls for, and stops when the
model only talks. It needs nothing but Python. It knows the OpenAI API, and has never heard of Polar.

    OPENAI_BASE_URL=... OPENAI_API_KEY=... python agent.py "What is in this folder?"
"""

import json
import os
import subprocess
import sys
import urllib.request

SHELL = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


def ask_model(messages: list[dict]) -> dict:
    """The model's next message."""
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": os.environ.get("OPENAI_MODEL", "any"), "messages": messages, "tools": [SHELL]}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]


def main(question: str) -> None:
    messages = [{"role": "user", "content": question}]
    while True:
        reply = ask_model(messages)
        messages.append(reply)
        if reply.get("content"):
            print(reply["content"])
        if not reply.get("tool_calls"):
            return
        for call in reply["tool_calls"]:
            command = json.loads(call["function"]["arguments"])["command"]
            print(f"$ {command}")
            done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout + done.stderr})


if __name__ == "__main__":
    main(sys.argv[1])
