"""The agent of tests/bridging.py: `plain` holds a conversation, `split` forgets what it said from call to call."""

import json
import os
import sys
import urllib.request

kind = sys.argv[1]
messages = [{"role": "user", "content": os.environ["POLAR_INSTRUCTION"]}]
for turn in range(2 if kind == "plain" else 3):
    body = json.dumps({"model": "m", "messages": messages, "max_tokens": 6}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        said = json.load(answer)["choices"][0]["message"]["content"] or ""
    if kind == "plain":
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Go on."}]
    else:
        messages = [{"role": "user", "content": f"{os.environ['POLAR_INSTRUCTION']} This is call {turn + 2}."}]
