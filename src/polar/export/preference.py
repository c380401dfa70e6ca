"""Preference pairs: `prompt`, `chosen` and `rejected`, as chat messages with `tools`; a line for each pair.

Both are sessions of the same task that began with the same messages and tools, so of the same harness, and the better
one earned more: the best is paired with the worst, the second with the second worst, and so on. A session is in one
pair at most. What follows the first request is the completion, results of tools included: a trainer that scores whole
completions scores those as well.

Who divides: the trainer.

What is lost: sessions whose agent began anew (a compaction, say), since two conversations are no one completion;
sub-agents' conversations; and tokens, since text is tokenised anew.
"""

from collections import defaultdict
from typing import Any, ClassVar

import msgspec
from msgspec import Struct

from polar.export.base import Item, JsonLines, Need
from polar.export.messages import addressed, chat_messages, chat_tools, conversations, unnamed

_ALONE = "session with none of another reward to be paired with"


class _Side(Struct):
    session_id: str
    reward: float
    sample: int
    created_at: float
    prompt: list[dict[str, Any]]
    completion: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    suspicious: bool

    def rank(self) -> tuple[float, int, float]:
        return -self.reward, self.sample, self.created_at


class Preference(JsonLines):
    name: ClassVar[str] = "preference"
    needs: ClassVar[frozenset[Need]] = frozenset(("messages", "reward", "group"))

    def __init__(self) -> None:
        super().__init__()
        self._group: str | None = None
        self._sides: defaultdict[bytes, list[_Side]] = defaultdict(list)  # by how they began

    def feed(self, item: Item) -> bytes:
        pairs = self._paired() if item.group != self._group else b""
        self._group = item.group
        self._take(item)
        return pairs

    def finish(self) -> bytes:
        return self._paired()

    def _take(self, item: Item) -> None:
        own = [found for found in conversations(item) if found.calls[0].role == "main"]
        if len(own) != 1 or own[0].calls[0].raw:
            self.left_out["session of no conversation, or of several" if own else "session without an answer"] += 1
            return
        first, last = own[0].calls[0], own[0].calls[-1]
        opening, whole = unnamed(first.messages), unnamed(last.whole)
        if whole[: len(opening)] != opening:
            self.left_out["session whose agent rewrote its beginning"] += 1
            return
        said, sample = chat_messages(addressed(last.whole)), item.session.metadata.get("sample")
        split = len(chat_messages(first.messages))
        reward = item.session.reward
        assert reward is not None  # others were left out before
        side = _Side(
            item.session.session_id,
            reward,
            sample if isinstance(sample, int) else 0,
            item.session.created_at,
            said[:split],
            said[split:],
            chat_tools(last.tools),
            item.session.suspicious,
        )
        self._sides[msgspec.json.encode([opening, last.tools])].append(side)

    def _paired(self) -> bytes:
        rows = []
        for sides in self._sides.values():
            sides.sort(key=_Side.rank)
            pairs = [
                (best, worst) for best, worst in zip(sides, reversed(sides), strict=True) if best.reward > worst.reward
            ]
            used = {one.session_id for pair in pairs for one in pair}
            if alone := sum(one.session_id not in used for one in sides):
                self.left_out[_ALONE] += alone
            rows += [self._row(chosen, rejected) for chosen, rejected in pairs]
        self._sides.clear()
        return self.write(rows)

    def _row(self, chosen: _Side, rejected: _Side) -> dict[str, Any]:
        return {
            "prompt": chosen.prompt,
            "chosen": chosen.completion,
            "rejected": rejected.completion,
            "tools": chosen.tools,
            "metadata": {
                "task_id": self._group,
                "chosen_session_id": chosen.session_id,
                "chosen_reward": chosen.reward,
                "chosen_suspicious": chosen.suspicious,
                "rejected_session_id": rejected.session_id,
                "rejected_reward": rejected.reward,
                "rejected_suspicious": rejected.suspicious,
            },
        }
