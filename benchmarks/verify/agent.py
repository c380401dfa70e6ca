"""The harness of `make bench-verify`: `python agent.py REQUEST TURNS`. It sends whole chat requests, as most do.

REQUEST is a JSON file: the first request's body, and the text that every tool call is answered with.
"""

import json
import os
import sys
import urllib.request
from pathlib import Path


def main(file: str, turns: int) -> None:
    given = json.loads(Path(file).read_text(encoding="utf-8"))
    body, result = given["body"], given["result"]
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    for turn in range(turns):
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as answer:
            said = json.load(answer)["choices"][0]["message"]
        body["messages"].append(said)
        for call in said.get("tool_calls") or ():
            told = {"role": "tool", "tool_call_id": call["id"], "content": f"{turn}: {result}"}
            body["messages"].append(told)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
