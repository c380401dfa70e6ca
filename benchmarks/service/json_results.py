"""Results as a straightforward server has them: a row of JSON for each, FastAPI, and the json module.

    python -m benchmarks.service.json_results DOCUMENTS DATABASE

DOCUMENTS has one on each line. Prints its address, and ends with its input.
"""

import asyncio
import json
import socket
import sqlite3
import sys
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse

from benchmarks.process import Address, print_message, run_async, wait_for_input_end


def create_app(documents: Path, database: Path) -> FastAPI:
    connection = sqlite3.connect(database, check_same_thread=False)
    connection.execute("CREATE TABLE results (cursor INTEGER PRIMARY KEY, document TEXT)")
    with documents.open(encoding="utf-8") as lines, connection:
        for line in lines:
            connection.execute("INSERT INTO results VALUES (?, ?)", (json.loads(line)["cursor"], line))
    made = FastAPI()

    @made.get("/rollout/results")
    def results(after: int = 0, limit: int = 100) -> JSONResponse:
        query = "SELECT document FROM results WHERE cursor > ? ORDER BY cursor LIMIT ?"
        found = [json.loads(text) for (text,) in connection.execute(query, (after, limit))]
        return JSONResponse({"results": found, "cursor": found[-1]["cursor"] if found else after})

    return made


async def serve(documents: Path, database: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(create_app(documents, database), log_level="warning", access_log=False))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    print_message(Address(f"http://127.0.0.1:{listener.getsockname()[1]}"))
    await wait_for_input_end()
    server.should_exit = True
    await serving


if __name__ == "__main__":
    run_async(serve(Path(sys.argv[1]), Path(sys.argv[2])))
