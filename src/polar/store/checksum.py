"""A digest of what an exchange is trained on: so that a stored number that changes later, by whatever accident, is
seen.

It is computed once, when the exchange is taken in, over the whole arrays; what stands in the database by difference
must give the same arrays again.
"""

from hashlib import sha256

import msgspec

from polar.store.arrays import ids_to_bytes, logprobs_to_bytes
from polar.store.base import Exchange


def checksum(exchange: Exchange) -> bytes:
    """Of the tokens, log-probabilities and versions, of how they were sampled, and of what they belong to."""
    pieces = (
        exchange.session_id.encode(),
        exchange.exchange_id.encode(),
        b"" if exchange.prompt_ids is None else ids_to_bytes(exchange.prompt_ids),
        b"" if exchange.sampled_ids is None else ids_to_bytes(exchange.sampled_ids),
        b"" if exchange.logprobs is None else logprobs_to_bytes(exchange.logprobs),
        msgspec.json.encode([exchange.versions, exchange.untrainable, exchange.logprob_kind, exchange.sampling]),
    )
    digest = sha256()
    for piece in pieces:
        digest.update(len(piece).to_bytes(8, "little"))  # so that nothing can move from one piece to the next
        digest.update(piece)
    return digest.digest()[:16]
