"""An agent that talks on, whatever the model says: sessions of known length, to measure what they cost.

OPENAI_BASE_URL=... OPENAI_API_KEY=... python talker.py TURNS TOKENS SYSTEM

SYSTEM: how often the system prompt says the same (22 tokens each, about).
"""

import json
import os
import sys
import urllib.request

WORDS = "the tool says that nothing has changed since the last time it was asked, and that it can be asked again; "

turns, tokens, system = map(int, sys.argv[1:])
messages = [
    {"role": "system", "content": "You work with a tool. " + system * WORDS},
    {"role": "user", "content": "Begin."},
]
headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
for turn in range(turns):
    body = json.dumps({"model": "any", "messages": messages, "max_tokens": tokens}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        said = json.load(answer)["choices"][0]["message"]["content"] or ""
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"Turn {turn}: " + 5 * WORDS}]
