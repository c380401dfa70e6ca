"""Which token comes next: from a row of logits, by what its request asked for.

The log-probability of a token is that of the distribution it was drawn from: after temperature, top-k, top-p and min-p
("processed"). At temperature 0 the likeliest token is taken, and nothing is scaled.
"""

from collections.abc import Sequence

import torch
from msgspec import Struct

from polar.engines.api_server.backend import SampledToken, SamplingOptions


class SamplingState(Struct):
    """One row of logits: how to choose from it, and the random numbers of a request that has a seed."""

    sampling: SamplingOptions
    generator: torch.Generator | None = None


@torch.inference_mode()
def sample_tokens(logits: torch.Tensor, states: Sequence[SamplingState], version: int) -> list[SampledToken]:
    """One token for each row. `logits`: [rows, vocabulary]."""
    scales = [row.sampling.temperature or 1.0 for row in states]
    logits = logits.float()
    if any(scale != 1 for scale in scales):
        logits = logits / torch.tensor(scales, device=logits.device)[:, None]
    narrow = [place for place, row in enumerate(states) if row.sampling.truncates_distribution]
    if narrow:
        logits = logits.clone()
        for place in narrow:
            logits[place] = _truncate_logits(logits[place], states[place].sampling)
    logprobs = torch.log_softmax(logits, -1)
    chosen = _draw_tokens(logprobs, states)
    ids = chosen.tolist()
    values = logprobs.gather(1, chosen[:, None])[:, 0].tolist()
    tokens = [SampledToken(id, value, version) for id, value in zip(ids, values, strict=True)]
    for place, row in enumerate(states):
        if row.sampling.alternatives:
            best = logprobs[place].topk(min(row.sampling.alternatives, logprobs.shape[1]))
            tokens[place].alternatives = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return tokens


def _draw_tokens(logprobs: torch.Tensor, states: Sequence[SamplingState]) -> torch.Tensor:
    """Draws each token by where a random number falls among the cumulative probabilities; greedy requests take the
    likeliest one."""
    greedy = [place for place, row in enumerate(states) if row.sampling.temperature == 0]
    if len(greedy) == len(states):
        return logprobs.argmax(-1)
    random = torch.rand(len(states), 1, dtype=torch.float64)
    for place, row in enumerate(states):
        if row.generator is not None:
            random[place] = torch.rand(1, dtype=torch.float64, generator=row.generator)
    sums = logprobs.exp().cumsum(-1, dtype=torch.float64)
    chosen = torch.searchsorted(sums, random.to(sums.device) * sums[:, -1:], right=True)[:, 0]
    chosen.clamp_(max=logprobs.shape[1] - 1)
    if greedy:
        chosen[greedy] = logprobs[greedy].argmax(-1)
    return chosen


def _truncate_logits(logits: torch.Tensor, sampling: SamplingOptions) -> torch.Tensor:
    """With what is not to be drawn at minus infinity. The likeliest token always stays."""
    ordered, order = logits.sort(descending=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if sampling.top_k:
        keep[sampling.top_k :] = False
    if sampling.top_p < 1 or sampling.min_p > 0:
        probabilities = ordered.masked_fill(~keep, -torch.inf).softmax(-1)
        keep &= probabilities.cumsum(-1) - probabilities < sampling.top_p
        keep &= probabilities >= sampling.min_p * probabilities[0]
    keep[0] = True
    return torch.full_like(logits, -torch.inf).scatter(0, order[keep], ordered[keep])
