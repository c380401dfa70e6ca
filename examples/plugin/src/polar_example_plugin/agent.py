"""The agent itself: asks the model once, and writes what it says into a file. It needs nothing but Python."""

import json
import os
import sys
import urllib.request
from pathlib import Path


def main() -> None:
    config = json.loads(Path(__file__).with_name("config.json").read_text(encoding="utf-8"))
    messages = [
        {"role": "system", "content": f"Answer with the content of {config['file']} and nothing else."},
        {"role": "user", "content": sys.argv[1]},
    ]
    request = urllib.request.Request(
        f"{config['base_url']}/chat/completions",
        json.dumps({"model": config["model"], "messages": messages}).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['POLAR_API_KEY']}"},
    )
    with urllib.request.urlopen(request) as answer:
        text = json.load(answer)["choices"][0]["message"]["content"]
    Path(config["file"]).write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
