"""An agent for the tests of training: so many turns with the model, and nothing but the standard library."""

import json
import os
import sys
import urllib.request

turns, tokens = int(sys.argv[1]), int(sys.argv[2])
messages = [{"role": "user", "content": os.environ["POLAR_INSTRUCTION"]}]
for _ in range(turns):
    body = json.dumps({"model": "m", "messages": messages, "max_tokens": tokens}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        said = json.load(answer)["choices"][0]["message"]["content"] or ""
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Go on."}]
