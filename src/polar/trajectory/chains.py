"""How a session's calls hang together, token for token: a chain goes on only where a prompt begins with everything that
the chain's last call saw and sampled."""

import numpy as np

from polar.engines.base import Ids
from polar.store.base import Exchange


class Chains:
    """Counts the traces that merging by exact prefix would give. Holds the open ends only."""

    def __init__(self) -> None:
        self._ends: list[Ids] = []

    def add(self, exchange: Exchange) -> None:
        prompt, sampled = exchange.prompt_ids, exchange.sampled_ids
        if prompt is None or sampled is None:
            return
        whole = np.concatenate([prompt, sampled])
        for index in reversed(range(len(self._ends))):
            end = self._ends[index]
            if len(end) <= len(prompt) and np.array_equal(end, prompt[: len(end)]):
                self._ends[index] = whole
                return
        self._ends.append(whole)

    def __len__(self) -> int:
        return len(self._ends)
