"""Which part each call of a session plays, and which agent made it.

    main         the agent that was given the task
    subagent     an agent that another one started
    compaction   the summary of an agent's history, from which the agent then continues
    auxiliary    side calls: titles, summaries, commit messages, checks
    retry        a dead attempt: it failed or was cut, and the same was asked again; or its gateway's process was killed

Roles are assigned when a session is read, from all of its calls: only then is it known what became of a reply.
Structure decides: which turn continues which, which calls have tools, where a reply turns up. The harness's call
patterns take precedence over it, and the task owner's overrides over both.

Every call has exactly one role and one agent, whatever order the calls are given in.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_args

import msgspec
from msgspec import Struct, field

from polar.errors import ConfigError
from polar.harnesses.base import CallPatterns, RolePattern
from polar.records.spans import TRAINABLE_ROLES, ExchangeRole
from polar.trajectory.conversations import Conversation, ModelCall, Turn, extract_text, link_turns, read_call

__all__ = ["CallLabel", "CallPatterns", "ModelCall", "RoleOverrides", "RolePattern", "assign_roles", "read_call"]

MAIN_AGENT_ID = "main"
MIN_QUOTE_CHARS = 20
"""A shorter text may occur in two places by chance."""
MIN_SUMMARY_SHARE = 0.25
"""Minimum share of a summary in the agent's next prompt: some harnesses cut its preamble off."""


class CallLabel(NamedTuple):
    role: ExchangeRole
    agent_id: str


class RoleOverrides(Struct, frozen=True):
    """The task owner's roles, in the session's metadata."""

    roles: dict[str, ExchangeRole] = field(default_factory=dict)
    """By exchange id; or by agent id, for all of the agent's turns and compactions."""

    trainable_roles: frozenset[ExchangeRole] = TRAINABLE_ROLES

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> "RoleOverrides":
        """Reads the overrides in a session's metadata, and ignores other entries. Raises ConfigError if they are
        invalid."""
        values = {name: metadata[name] for name in ("roles", "trainable_roles") if metadata.get(name) is not None}
        try:
            return msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            roles = ", ".join(get_args(ExchangeRole))
            raise ConfigError(
                f"The session's metadata can't be used: {error}. `roles` gives exchange ids or agent ids a role, "
                f"`trainable_roles` is a list of roles; roles are {roles}."
            ) from error


NO_OVERRIDES = RoleOverrides()


def assign_roles(
    calls: Sequence[ModelCall], *, patterns: CallPatterns | None = None, overrides: RoleOverrides = NO_OVERRIDES
) -> dict[str, CallLabel]:
    """Returns a label for each exchange id. `calls` must be all calls of the session."""
    # The request of an interrupted call is unknown, so it does not count for the structure.
    assigner = _RoleAssigner([call for call in calls if call.status != "interrupted"], patterns or CallPatterns())
    labels = assigner.label_calls()
    for call in calls:
        if call.status == "interrupted":
            labels[call.exchange_id] = CallLabel("retry", assigner.main_agent)
    for exchange_id, label in labels.items():
        role = label.role
        if label.agent_id in overrides.roles and role not in ("retry", "auxiliary"):
            role = overrides.roles[label.agent_id]
        labels[exchange_id] = CallLabel(overrides.roles.get(exchange_id, role), label.agent_id)
    return labels


class _RoleAssigner:
    def __init__(self, calls: Sequence[ModelCall], patterns: CallPatterns) -> None:
        self._patterns = patterns
        self._system_matches: dict[tuple[str, str], bool] = {}  # whether words stand in a system prompt
        self._turns = link_turns([(call, self._find_agent_hint(call)) for call in calls])
        self._marked_roles = {
            turn.call.exchange_id: mark.role for turn in self._turns if (mark := self._find_mark(turn))
        }
        self._join_last_answers()
        self._dead_attempt_ids = self._find_dead_attempts()
        self._compaction_ids = self._find_compactions()
        self._main_conversation = self._find_main_conversation()

    # The harness's call patterns

    def _find_agent_hint(self, call: ModelCall) -> str | None:
        return next((call.hints[name] for name in self._patterns.agent_headers if call.hints.get(name)), None)

    def _find_mark(self, turn: Turn) -> RolePattern | None:
        call, messages = turn.call, turn.messages
        last_text = extract_text(messages[-1]) if messages and messages[-1].role == "user" else ""
        for mark in self._patterns.role_patterns:
            if (
                (mark.header is None or (mark.header in call.hints and mark.header_text in call.hints[mark.header]))
                and (mark.system_prompt is None or self._is_in_system_prompt(mark.system_prompt, turn.system_prompt))
                and (mark.last_user_message is None or mark.last_user_message in last_text)
            ):
                return mark
        return None

    def _is_in_system_prompt(self, words: str, system: str) -> bool:
        """Whether a system prompt has these words. Cached, since a session has few system prompts, and long ones."""
        matches = self._system_matches.get((words, system))
        if matches is None:
            matches = self._system_matches[words, system] = words in system
        return matches

    def _is_subagent(self, conversation: Conversation) -> bool:
        calls = [turn.call for turn in conversation.turns if turn.call.exchange_id not in self._marked_roles]
        return any(name in call.hints for call in calls for name in self._patterns.subagent_headers)

    # Last answers

    def _join_last_answers(self) -> None:
        """Adds last answers to their conversations. Some harnesses make an agent that ran out of steps answer under
        another system prompt, without tools and with its calls rewritten as prose. Its history shows which conversation
        it ends: one whose last turn called tools and has no next turn. Titles and summaries of finished agents end
        none."""
        for index, turn in enumerate(self._turns):
            call = turn.call
            if turn.previous is not None or len(turn.conversation.turns) > 1 or call.request.tools:
                continue
            if call.exchange_id in self._marked_roles or not any(
                message.role == "assistant" for message in turn.messages
            ):
                continue
            ended = next((earlier for earlier in reversed(self._turns[:index]) if _is_ended_by(earlier, turn)), None)
            if ended is not None:
                turn.previous = ended
                ended.next_turns.append(turn)
                ended.conversation.absorb(turn.conversation)

    # Retries

    def _find_dead_attempts(self) -> set[str]:
        """Finds partial replies without a next turn whose request was sent again later. Two complete replies to one
        request are two samples."""
        if all(turn.call.is_fully_delivered or turn.next_turns for turn in self._turns):
            return set()  # the usual case: no digest is computed
        dead, later_digests = set(), set()
        for turn in reversed(self._turns):
            call, digest = turn.call, turn.call.request_digest
            if not call.is_fully_delivered and not turn.next_turns and digest in later_digests:
                dead.add(call.exchange_id)
            later_digests.add(digest)
        return dead

    # Compactions

    def _find_compactions(self) -> set[str]:
        """Finds calls that saw an agent's history, and whose reply then replaced that history."""
        compactions = set()
        for index, turn in enumerate(self._turns):
            marked = self._marked_roles.get(turn.call.exchange_id)
            if marked not in (None, "compaction") or turn.next_turns or turn.call.calls_tools:
                continue
            home = self._find_summarized_conversation(index) if turn.previous is None else turn.conversation
            if home is None:
                continue
            heir = next(
                (later for later in self._turns[index + 1 :] if _continues_from_summary(later, turn, home)), None
            )
            if heir is not None:
                home.absorb(heir.conversation)
            if heir is not None or marked:
                home.absorb(turn.conversation)
                compactions.add(turn.call.exchange_id)
        for turn in reversed(self._turns):  # a draft of a summary is a compaction as well
            if self._is_side_call(turn) and any(later.call.exchange_id in compactions for later in turn.next_turns):
                compactions.add(turn.call.exchange_id)
        return compactions

    def _find_summarized_conversation(self, index: int) -> Conversation | None:
        """Returns the running conversation of which a request that is one long text quotes the most messages."""
        turn = self._turns[index]
        text = "\n".join(extract_text(message) for message in turn.messages)
        latest = {
            earlier.conversation: earlier
            for earlier in self._turns[:index]
            if earlier.conversation.hint == turn.conversation.hint
            and (earlier.previous is not None or earlier.call.calls_tools)
        }
        latest.pop(turn.conversation, None)
        max_quotes, best = 0, None
        for earlier in latest.values():
            words = [
                extract_text(message) for message in earlier.messages if message.role not in ("system", "developer")
            ]
            quotes = sum(
                len(word) >= MIN_QUOTE_CHARS and word in text for word in (*words, earlier.call.reply_text.strip())
            )
            if quotes > max_quotes:
                max_quotes, best = quotes, earlier.conversation
        return best

    # Agents

    def _find_main_conversation(self) -> Conversation | None:
        """Returns the first conversation with tools or, if none has tools, the first one."""
        unmarked = dict.fromkeys(
            turn.conversation for turn in self._turns if turn.call.exchange_id not in self._marked_roles
        )
        conversations = [conversation for conversation in unmarked if not self._is_subagent(conversation)]
        with_tools = (conversation for conversation in conversations if _has_tools(conversation))
        return next(with_tools, conversations[0] if conversations else None)

    def _restarts_main_agent(self, conversation: Conversation) -> bool:
        """Whether the main agent starts afresh: with the same system prompt, and not while one of its tools runs."""
        main, first = self._main_conversation, conversation.turns[0]
        if main is None or self._is_subagent(conversation) or first.system_prompt != main.turns[0].system_prompt:
            return False
        return not any(
            turn.call.calls_tools and turn.call.seq < first.call.seq < later.call.seq
            for turn in main.turns
            for later in turn.next_turns
        )

    def _classify_conversation(self, conversation: Conversation) -> ExchangeRole:
        if conversation is self._main_conversation:
            return "main"
        if all(turn.call.exchange_id in self._marked_roles for turn in conversation.turns):
            return "auxiliary"
        main = self._main_conversation
        equipped = _has_tools(conversation) or (main is not None and not _has_tools(main))
        if equipped and self._restarts_main_agent(conversation):
            return "main"
        goes_on = any(turn.next_turns for turn in conversation.turns)
        return "subagent" if _has_tools(conversation) or goes_on or self._is_subagent(conversation) else "auxiliary"

    def _is_side_call(self, turn: Turn) -> bool:
        """Whether a call has no tools although its conversation has some. The last turn may have none: an agent that is
        made to answer now, perhaps under another system prompt if it was still at work."""
        call, previous = turn.call, turn.previous
        if call.request.tools or not _has_tools(turn.conversation):
            return False
        answers = (
            previous is not None
            and turn is turn.conversation.turns[-1]
            and (
                turn.system_prompt == previous.system_prompt
                or (previous.call.calls_tools and turn.extends_history_of(previous))
            )
            and call.request.response_format.kind == previous.call.request.response_format.kind
        )
        return not answers

    @property
    def main_agent(self) -> str:
        return (
            MAIN_AGENT_ID
            if self._main_conversation is None or self._main_conversation.hint is None
            else self._main_conversation.hint
        )

    def label_calls(self) -> dict[str, CallLabel]:
        roles: dict[Conversation, ExchangeRole] = {}
        agents: dict[Conversation, str] = {}
        started = 0
        for turn in self._turns:
            conversation = turn.conversation
            if conversation in roles:
                continue
            role = roles[conversation] = self._classify_conversation(conversation)
            if conversation.hint is not None:
                agents[conversation] = conversation.hint
            elif role == "subagent":
                started += 1
                agents[conversation] = f"agent-{started}"
            else:  # side calls belong to the main agent
                agents[conversation] = self.main_agent
        labels = {}
        for turn in self._turns:
            name = turn.call.exchange_id
            role = roles[turn.conversation]
            if name in self._dead_attempt_ids:
                role = "retry"
            elif name in self._marked_roles:
                role = self._marked_roles[name]
            elif name in self._compaction_ids:
                role = "compaction"
            elif self._is_side_call(turn):
                role = "auxiliary"
            labels[name] = CallLabel(role, agents[turn.conversation])
        return labels


def _has_tools(conversation: Conversation) -> bool:
    return any(turn.call.request.tools for turn in conversation.turns)


def _is_ended_by(earlier: Turn, answer: Turn) -> bool:
    conversation, request = earlier.conversation, earlier.call.request
    return (
        conversation.hint == answer.conversation.hint
        and earlier is conversation.turns[-1]
        and not earlier.next_turns
        and earlier.call.calls_tools
        and bool(request.tools)
        and request.response_format.kind == answer.call.request.response_format.kind
        and answer.extends_history_of(earlier)
    )


def _continues_from_summary(later: Turn, summary: Turn, home: Conversation) -> bool:
    """Whether `later` has the summary in place of the history that it sums up."""
    is_restart = later is later.conversation.turns[0] and later.conversation.hint == home.hint
    if is_restart:  # another agent that gets the summary as its task has another system prompt
        is_restart = any(turn.system_prompt == later.system_prompt for turn in home.turns if turn is not summary)
    if (
        not (is_restart or later.conversation is home)
        or later.call.request_digest == summary.call.request_digest
        or not later.drops_work_of(summary)
    ):
        return False
    new_text = "\n".join(extract_text(message) for message in later.list_new_messages() if message.role != "tool")
    lines = [line for line in map(str.strip, summary.call.reply_text.splitlines()) if len(line) >= MIN_QUOTE_CHARS]
    carried = sum(len(line) for line in lines if line in new_text)
    return bool(lines) and carried >= MIN_SUMMARY_SHARE * sum(map(len, lines))
