"""A server of one tool, for harnesses: JSON-RPC, a message a line, on standard input and output.

The tool `multiply` gives the product with the word of the variable WORD before it, so that its result stands nowhere
but in what it returns.
"""

import json
import os
import sys
from typing import Any

_TOOL = {
    "name": "multiply",
    "description": "Multiplies two numbers.",
    "inputSchema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}


def answer(method: str, params: dict[str, Any]) -> dict[str, Any] | None:
    if method == "initialize":
        info = {"name": "numbers", "version": "1.0.0"}
        return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": info}
    if method == "tools/list":
        return {"tools": [_TOOL]}
    if method == "tools/call":
        given = params["arguments"]
        text = f"{os.environ['WORD']} {given['a'] * given['b']}"
        return {"content": [{"type": "text", "text": text}]}
    return {} if method == "ping" else None


def main() -> None:
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message or "method" not in message:  # a notification
            continue
        reply: dict[str, Any] = {"jsonrpc": "2.0", "id": message["id"]}
        result = answer(message["method"], message.get("params") or {})
        if result is None:
            reply["error"] = {"code": -32601, "message": "There is no such method."}
        else:
            reply["result"] = result
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
