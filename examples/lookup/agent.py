"""An agent that answers questions out of a book, on the official OpenAI client. It has never heard of Polar.

The first line of each reply of the model's is a command:

    lookup(NAME)     what book.txt says of NAME is the next message
    answer(NUMBER)   goes to answer.txt, and that is the end

Anything else is answered with the rules. The model sees one conversation as an example before the question.

    OPENAI_BASE_URL=... OPENAI_API_KEY=... python agent.py [--lookups N] "Find the number of Milo."

With --http it speaks to the same API without the client, whose import takes most of a second: for thousands of runs.
"""

import argparse
import json
import os
import re
import urllib.request
from collections.abc import Callable
from pathlib import Path

Complete = Callable[[list[dict[str, str]]], str]
"""Messages in, the model's reply out."""

RULES = "Reply with lookup(name) or answer(number)."
MAX_TOKENS = 16  # of a reply
SPARE_REPLIES = 1  # besides those that an agent needs that makes no mistake


def example(lookups: int) -> list[str]:
    """What a user and the model say in turn."""
    question = "Find the number of Anna."
    if lookups == 1:
        return [question, "lookup(Anna)", "Anna: 35", "answer(35)"]
    return [question, "lookup(Anna)", "Anna: see Paul", "lookup(Paul)", "Paul: 3507", "answer(3507)"]


def read_book(path: Path) -> dict[str, str]:
    lines = path.read_text().splitlines()
    return dict(line.split(": ", 1) for line in lines if ": " in line)


def by_client(model: str) -> Complete:
    from openai import OpenAI

    client = OpenAI()

    def complete(messages: list[dict[str, str]]) -> str:
        reply = client.chat.completions.create(model=model, messages=messages, max_tokens=MAX_TOKENS)
        return reply.choices[0].message.content or ""

    return complete


def by_http(model: str) -> Complete:
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}

    def complete(messages: list[dict[str, str]]) -> str:
        body = json.dumps({"model": model, "messages": messages, "max_tokens": MAX_TOKENS}).encode()
        request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)
        with urllib.request.urlopen(request) as reply:
            return json.load(reply)["choices"][0]["message"]["content"] or ""

    return complete


def solve(complete: Complete, question: str, lookups: int) -> None:
    messages = [{"role": "system", "content": RULES}]
    for number, said in enumerate([*example(lookups), question]):
        messages.append({"role": "assistant" if number % 2 else "user", "content": said})
    for _ in range(lookups + 1 + SPARE_REPLIES):
        reply = complete(messages)
        print(f"> {reply}")
        command = re.match(r"\s*(lookup|answer)\((\w+)\)[ \t]*(?:\n|$)", reply)
        if command is None:
            told = RULES
        elif command[1] == "answer":
            Path("answer.txt").write_text(command[2])
            return
        else:
            told = f"{command[2]}: {read_book(Path('book.txt')).get(command[2], 'not found')}"
        print(told)
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": told}]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Answers a question out of book.txt.")
    parser.add_argument("--lookups", type=int, default=1, help="that the question takes")
    parser.add_argument("--http", action="store_true", help="without the OpenAI client")
    parser.add_argument("question")
    options = parser.parse_args()
    way = by_http if options.http else by_client
    solve(way(os.environ.get("OPENAI_MODEL", "polar")), options.question, options.lookups)
