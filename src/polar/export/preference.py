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

from polar.export.base import ExportNeed, JsonLines, SessionItem
from polar.export.messages import (
    build_chat_messages,
    build_chat_tools,
    collect_branches,
    normalize_call_ids,
    rename_developer_role,
)

_UNPAIRED_REASON = "session with none of another reward to be paired with"


class _Candidate(Struct):
    session_id: str
    reward: float
    sample: int
    created_at: float
    prompt: list[dict[str, Any]]
    completion: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    suspicious: bool

    def sort_key(self) -> tuple[float, int, float]:
        return -self.reward, self.sample, self.created_at


class PreferenceExporter(JsonLines):
    name: ClassVar[str] = "preference"
    needs: ClassVar[frozenset[ExportNeed]] = frozenset(("messages", "reward", "group"))

    def __init__(self) -> None:
        super().__init__()
        self._group_id: str | None = None
        self._candidates: defaultdict[bytes, list[_Candidate]] = defaultdict(list)  # by how they began

    def feed(self, item: SessionItem) -> bytes:
        pairs = self._flush_pairs() if item.group_id != self._group_id else b""
        self._group_id = item.group_id
        self._add_candidate(item)
        return pairs

    def finish(self) -> bytes:
        return self._flush_pairs()

    def _add_candidate(self, item: SessionItem) -> None:
        own = [found for found in collect_branches(item) if found.calls[0].role == "main"]
        if len(own) != 1 or own[0].calls[0].is_raw_completion:
            self.left_out["session of no conversation, or of several" if own else "session without an answer"] += 1
            return
        first, last = own[0].calls[0], own[0].calls[-1]
        opening, whole = normalize_call_ids(first.request_messages), normalize_call_ids(last.transcript)
        if whole[: len(opening)] != opening:
            self.left_out["session whose agent rewrote its beginning"] += 1
            return
        said, sample = build_chat_messages(rename_developer_role(last.transcript)), item.session.metadata.get("sample")
        split = len(build_chat_messages(first.request_messages))
        reward = item.session.reward
        assert reward is not None  # others were left out before
        side = _Candidate(
            item.session.session_id,
            reward,
            sample if isinstance(sample, int) else 0,
            item.session.created_at,
            said[:split],
            said[split:],
            build_chat_tools(last.tools),
            item.session.suspicious,
        )
        self._candidates[msgspec.json.encode([opening, last.tools])].append(side)

    def _flush_pairs(self) -> bytes:
        rows = []
        for sides in self._candidates.values():
            sides.sort(key=_Candidate.sort_key)
            pairs = [
                (best, worst) for best, worst in zip(sides, reversed(sides), strict=True) if best.reward > worst.reward
            ]
            used = {one.session_id for pair in pairs for one in pair}
            if unpaired := sum(one.session_id not in used for one in sides):
                self.left_out[_UNPAIRED_REASON] += unpaired
            rows += [self._pair_row(chosen, rejected) for chosen, rejected in pairs]
        self._candidates.clear()
        return self.encode_rows(rows)

    def _pair_row(self, chosen: _Candidate, rejected: _Candidate) -> dict[str, Any]:
        return {
            "prompt": chosen.prompt,
            "chosen": chosen.completion,
            "rejected": rejected.completion,
            "tools": chosen.tools,
            "metadata": {
                "task_id": self._group_id,
                "chosen_session_id": chosen.session_id,
                "chosen_reward": chosen.reward,
                "chosen_suspicious": chosen.suspicious,
                "rejected_session_id": rejected.session_id,
                "rejected_reward": rejected.reward,
                "rejected_suspicious": rejected.suspicious,
            },
        }
