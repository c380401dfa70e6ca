"""Pictures and other media that a request names by address.

The gateway fetches nothing. It would pass the address on, and the engine would fetch it: from inside the engine's
network, or from its disk (`file://`). Agents, and whoever writes what agents read, must not have that reach unless the
operator allows it (`[engine] image_urls = "pass"`).
"""

from polar.errors import ApiError
from polar.types import Media, Request, Text, ToolResult

_SHOWN_CHARACTERS = 100


def refuse_media_urls(request: Request) -> None:
    """Raises ApiError where a message contains media by an address other than a `data:` URL."""
    for message in request.messages:
        for part in message.parts:
            if type(part) is Text:
                continue
            if isinstance(part, Media):
                _refuse_remote_url(part)
            elif isinstance(part, ToolResult):
                for piece in part.parts:
                    if isinstance(piece, Media):
                        _refuse_remote_url(piece)


def _refuse_remote_url(media: Media) -> None:
    address = media.url
    if address is None and media.data is not None and "://" in media.data[:64]:
        address = media.data  # where clients may write either
    if address is None or address[:5].lower() == "data:":
        return
    raise ApiError(
        "invalid_request",
        f"The {media.kind} {address[:_SHOWN_CHARACTERS]!r} is refused: the engine would fetch it from its own network. "
        'Send the content as a data: URL, or set [engine] image_urls = "pass".',
    )
