"""An agent for the tests of training: so many turns with the model, and nothing but the standard library.

Where a folder is named, it leaves a mark there after its first turn, and waits for the mark of its group. The first
session of a group to do so also leaves a file called "first" in its workspace."""

import contextlib
import json
import os
import sys
import time
import urllib.request

turns, tokens = int(sys.argv[1]), int(sys.argv[2])
mark = os.path.join(sys.argv[3], "-".join(os.environ["TASK_ID"].split("/")[-2:])) if len(sys.argv) > 3 else None
messages = [{"role": "user", "content": os.environ["POLAR_INSTRUCTION"]}]
for _ in range(turns):
    body = json.dumps({"model": "m", "messages": messages, "max_tokens": tokens}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        said = json.load(answer)["choices"][0]["message"]["content"] or ""
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Go on."}]
    if mark is not None:
        with contextlib.suppress(FileExistsError):
            open(f"{mark}-first", "x").close()
            open("first", "w").close()
        open(f"{mark}.{os.environ['SESSION_ID']}", "w").close()
        while not os.path.exists(mark):
            time.sleep(0.02)
