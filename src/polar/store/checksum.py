"""A digest of an exchange's training data, by which an accidental change in the store is noticed.

It is computed once, when the exchange is appended, over the complete arrays; the differences in the database must give
the same arrays again.

The prompt goes in as its own SHA-256: prompts of a session repeat one another, so a check of many can continue one hash
from the other. Rows of older versions have digests of 16 bytes, which the prompt's ids go into directly.
"""

from hashlib import sha256

import msgspec

from polar.records.exchange import Exchange
from polar.store.arrays import ids_to_bytes, logprobs_to_bytes

_FORMAT = b"\x02"
_LEGACY_DIGEST_BYTES = 16


def compute_checksum(exchange: Exchange) -> bytes:
    """Computes the checksum of an exchange's ids, tokens, log-probabilities, versions and sampling parameters."""
    prompt = b"" if exchange.prompt_ids is None else sha256(ids_to_bytes(exchange.prompt_ids)).digest()
    return _FORMAT + _digest(exchange, prompt)


def matches_checksum(exchange: Exchange, prompt_digest: bytes) -> bool:
    """Whether an exchange, which must have a checksum, is as it was appended. `prompt_digest` is the SHA-256 of its
    prompt's ids, and is ignored if there is no prompt."""
    if exchange.checksum is not None and len(exchange.checksum) == _LEGACY_DIGEST_BYTES:  # of an older version
        prompt = b"" if exchange.prompt_ids is None else ids_to_bytes(exchange.prompt_ids)
        return exchange.checksum == _digest(exchange, prompt)
    prompt = b"" if exchange.prompt_ids is None else prompt_digest
    return exchange.checksum == _FORMAT + _digest(exchange, prompt)


def _digest(exchange: Exchange, prompt: bytes) -> bytes:
    pieces = (
        exchange.session_id.encode(),
        exchange.exchange_id.encode(),
        prompt,
        b"" if exchange.sampled_ids is None else ids_to_bytes(exchange.sampled_ids),
        b"" if exchange.logprobs is None else logprobs_to_bytes(exchange.logprobs),
        msgspec.json.encode([exchange.versions, exchange.untrainable, exchange.logprob_kind, exchange.sampling]),
    )
    # Lengths come first, so that nothing can move from one piece to the next.
    framed = b"".join(part for piece in pieces for part in (len(piece).to_bytes(8, "little"), piece))
    return sha256(framed).digest()[:_LEGACY_DIGEST_BYTES]
