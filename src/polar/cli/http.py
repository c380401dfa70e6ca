"""Small calls of the command line to a control plane."""

import contextlib
import json
import urllib.error
import urllib.request
from typing import Any

from polar.errors import PolarError


class ServerError(PolarError):
    """The control plane did not do what was asked."""


def post(server: str, path: str, body: dict[str, Any], token: str | None) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    if not server.startswith(("http://", "https://")):
        raise ServerError(f"{server!r} is no address: it begins with http:// or https://.")
    request = urllib.request.Request(server.rstrip("/") + path, json.dumps(body).encode(), headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            answer: dict[str, Any] = json.load(response)
            return answer
    except urllib.error.HTTPError as error:
        detail = error.read().decode("utf-8", "replace")
        with contextlib.suppress(ValueError):  # not JSON: shown as it is
            detail = json.loads(detail).get("detail", detail)
        raise ServerError(f"{server} answered {error.code}: {detail}") from error
    except (urllib.error.URLError, TimeoutError) as error:
        reason = getattr(error, "reason", error)
        raise ServerError(f"No control plane answers at {server} ({reason}): start one with `polar up`.") from error
