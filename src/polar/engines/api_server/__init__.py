"""The server of our own engines: vLLM's HTTP API over anything that samples tokens.

An engine implements `SamplingBackend` (backend.py) and hands it to an `ApiServer` (server.py), which reads requests
(request_reader.py), runs the generation, and writes the reply (replies.py), all in typed records (wire.py). Routes that
only one engine has are its own, and given to the server.
"""
