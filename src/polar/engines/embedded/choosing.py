"""Which token comes next: from a row of logits, by what its request asked for.

The log-probability of a token is that of the distribution it was drawn from: after temperature, top-k, top-p and min-p
("processed"). At temperature 0 the likeliest token is taken, and nothing is scaled.
"""

from collections.abc import Sequence

import torch
from msgspec import Struct

from polar.engines.embedded.generation import Choosing, Token


class Row(Struct):
    """One row of logits: how to choose from it, and the random numbers of a request that has a seed."""

    choosing: Choosing
    random: torch.Generator | None = None


@torch.inference_mode()
def choose(logits: torch.Tensor, rows: Sequence[Row], version: int) -> list[Token]:
    """One token for each row. `logits`: [rows, vocabulary]."""
    scales = [row.choosing.temperature or 1.0 for row in rows]
    logits = logits.float()
    if any(scale != 1 for scale in scales):
        logits = logits / torch.tensor(scales, device=logits.device)[:, None]
    narrow = [place for place, row in enumerate(rows) if row.choosing.narrows]
    if narrow:
        logits = logits.clone()
        for place in narrow:
            logits[place] = _narrowed(logits[place], rows[place].choosing)
    logprobs = torch.log_softmax(logits, -1)
    chosen = _drawn(logprobs, rows)
    ids = chosen.tolist()
    values = logprobs.gather(1, chosen[:, None])[:, 0].tolist()
    tokens = [Token(id, value, version) for id, value in zip(ids, values, strict=True)]
    for place, row in enumerate(rows):
        if row.choosing.alternatives:
            best = logprobs[place].topk(min(row.choosing.alternatives, logprobs.shape[1]))
            tokens[place].alternatives = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return tokens


def _drawn(logprobs: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Where a random number between 0 and 1 falls among the summed probabilities; the greedy ones take the largest."""
    greedy = [place for place, row in enumerate(rows) if row.choosing.temperature == 0]
    if len(greedy) == len(rows):
        return logprobs.argmax(-1)
    random = torch.rand(len(rows), 1, dtype=torch.float64)
    for place, row in enumerate(rows):
        if row.random is not None:
            random[place] = torch.rand(1, dtype=torch.float64, generator=row.random)
    sums = logprobs.exp().cumsum(-1, dtype=torch.float64)
    chosen = torch.searchsorted(sums, random.to(sums.device) * sums[:, -1:], right=True)[:, 0]
    chosen.clamp_(max=logprobs.shape[1] - 1)
    if greedy:
        chosen[greedy] = logprobs[greedy].argmax(-1)
    return chosen


def _narrowed(logits: torch.Tensor, choosing: Choosing) -> torch.Tensor:
    """With what is not to be drawn at minus infinity. The likeliest token always stays."""
    ordered, order = logits.sort(descending=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if choosing.top_k:
        keep[choosing.top_k :] = False
    if choosing.top_p < 1 or choosing.min_p > 0:
        probabilities = ordered.masked_fill(~keep, -torch.inf).softmax(-1)
        keep &= probabilities.cumsum(-1) - probabilities < choosing.top_p
        keep &= probabilities >= choosing.min_p * probabilities[0]
    keep[0] = True
    return torch.full_like(logits, -torch.inf).scatter(0, order[keep], ordered[keep])
