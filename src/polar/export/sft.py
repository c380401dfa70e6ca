"""Chat JSON lines for supervised fine-tuning: `messages` and `tools`, one line for each conversation.

Only accepted sessions: a reward above 0, or what `--min-reward` asks for. A conversation is the last request of calls
that go on from one another, with its reply; a fork or a sub-agent is one of its own.

Who divides: the trainer.

Messages of role `developer`, which few templates know, are system messages.

What is lost: tokens and log-probabilities, since text is tokenised anew; and thinking that the harness did not send
back. A conversation that forks repeats the turns before the fork, so they are learnt once more. Calls of the
completions API have no messages and are left out.
"""

from collections.abc import Iterable
from typing import Any, ClassVar

from polar.export.base import ExportNeed, SessionItem, SessionLines
from polar.export.messages import build_chat_messages, build_chat_tools, collect_branches, rename_developer_role


class SftExporter(SessionLines):
    name: ClassVar[str] = "sft"
    needs: ClassVar[frozenset[ExportNeed]] = frozenset(("messages", "accepted"))

    def build_lines(self, item: SessionItem) -> Iterable[dict[str, Any]]:
        found = collect_branches(item)
        if not found:
            self.left_out["session without an answered call"] += 1
        for conversation in found:
            last = conversation.calls[-1]
            if last.is_raw_completion:
                self.left_out["call of the completions API"] += 1
                continue
            yield {
                "messages": build_chat_messages(rename_developer_role(last.transcript)),
                "tools": build_chat_tools(last.tools),
                "metadata": {
                    "session_id": item.session.session_id,
                    "task_id": item.group_id,
                    "reward": item.session_paths.reward,
                    "suspicious": item.session.suspicious,
                    "role": last.role,
                    "agent_id": last.agent_id,
                    "exchange_ids": [one.exchange.exchange_id for one in conversation.calls],
                },
            }
