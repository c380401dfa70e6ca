"""Which part each call of a session plays, and which agent made it.

    main         the agent that was given the task
    subagent     an agent that another one started
    compaction   an agent's history put into fewer words, with which it then goes on
    auxiliary    everything on the side: titles, summaries, commit messages, checks
    retry        a dead attempt: it failed or was cut, and the same was asked again; or its gateway's process was killed

Roles are given when a session is read, from all of its calls: only then is it known what became of a reply. Structure
decides: who goes on from whom, who has tools, whose reply turns up where. What is known of the harness comes in as data
and counts for more; what the task's owner says counts most.

Every call has exactly one role and one agent, whatever order the calls are given in.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_args

import msgspec
from msgspec import Struct, field

from polar.errors import ConfigError
from polar.harnesses.base import CallPatterns, RolePattern
from polar.records.spans import TRAINABLE_ROLES, ExchangeRole
from polar.trajectory.conversations import Conversation, ModelCall, Turn, link_turns, message_text, read_call

__all__ = ["CallLabel", "CallPatterns", "ModelCall", "RoleOverrides", "RolePattern", "assign_roles", "read_call"]

MAIN_AGENT_ID = "main"
MIN_QUOTE_CHARS = 20
"""Characters: a shorter text may stand in two places by chance."""
MIN_SUMMARY_SHARE = 0.25
"""How much of a summary turns up in the agent's next prompt, at least: some harnesses cut its preamble off."""


class CallLabel(NamedTuple):
    role: ExchangeRole
    agent_id: str


class RoleOverrides(Struct, frozen=True):
    """What a task's owner says of roles, in the session's metadata."""

    roles: dict[str, ExchangeRole] = field(default_factory=dict)
    """By exchange id; or by agent id, for all of the agent's turns and compactions."""

    trainable_roles: frozenset[ExchangeRole] = TRAINABLE_ROLES

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> "RoleOverrides":
        """From a session's metadata, where other things may stand as well."""
        said = {name: metadata[name] for name in ("roles", "trainable_roles") if metadata.get(name) is not None}
        try:
            return msgspec.convert(said, cls)
        except msgspec.ValidationError as error:
            roles = ", ".join(get_args(ExchangeRole))
            raise ConfigError(
                f"The session's metadata can't be used: {error}. `roles` gives exchange ids or agent ids a role, "
                f"`trainable_roles` is a list of roles; roles are {roles}."
            ) from error


NO_OVERRIDES = RoleOverrides()


def assign_roles(
    calls: Sequence[ModelCall], *, knowledge: CallPatterns | None = None, overrides: RoleOverrides = NO_OVERRIDES
) -> dict[str, CallLabel]:
    """By exchange id. `calls` are all of a session's."""
    # Nothing is known of what an interrupted call asked, so it takes no part in what the others' structure says.
    session = _RoleAssigner([call for call in calls if call.status != "interrupted"], knowledge or CallPatterns())
    labels = session.label_calls()
    for call in calls:
        if call.status == "interrupted":
            labels[call.exchange_id] = CallLabel("retry", session.main_agent)
    for exchange_id, label in labels.items():
        role = label.role
        if label.agent_id in overrides.roles and role not in ("retry", "auxiliary"):
            role = overrides.roles[label.agent_id]
        labels[exchange_id] = CallLabel(overrides.roles.get(exchange_id, role), label.agent_id)
    return labels


class _RoleAssigner:
    def __init__(self, calls: Sequence[ModelCall], known: CallPatterns) -> None:
        self._knowledge = known
        self._system_matches: dict[tuple[str, str], bool] = {}  # which words stand in which system prompt
        self._turns = link_turns([(call, self._agent_hint(call)) for call in calls])
        self._marked_roles = {
            turn.call.exchange_id: mark.role for turn in self._turns if (mark := self._find_mark(turn))
        }
        self._join_last_answers()
        self._dead_attempt_ids = self._find_dead_attempts()
        self._compaction_ids = self._find_compactions()
        self._main_conversation = self._find_main_conversation()

    # What the harness says of itself

    def _agent_hint(self, call: ModelCall) -> str | None:
        return next((call.hints[name] for name in self._knowledge.agent_headers if call.hints.get(name)), None)

    def _find_mark(self, turn: Turn) -> RolePattern | None:
        call, said = turn.call, turn.messages
        last = message_text(said[-1]) if said and said[-1].role == "user" else ""
        for mark in self._knowledge.role_patterns:
            if (
                (mark.header is None or (mark.header in call.hints and mark.header_text in call.hints[mark.header]))
                and (mark.system_prompt is None or self._in_system(mark.system_prompt, turn.system_prompt))
                and (mark.last_user_message is None or mark.last_user_message in last)
            ):
                return mark
        return None

    def _in_system(self, words: str, system: str) -> bool:
        """A session has few system prompts, and they are long."""
        found = self._system_matches.get((words, system))
        if found is None:
            found = self._system_matches[words, system] = words in system
        return found

    def _is_subagent(self, talk: Conversation) -> bool:
        own = [turn.call for turn in talk.turns if turn.call.exchange_id not in self._marked_roles]
        return any(name in call.hints for call in own for name in self._knowledge.subagent_headers)

    # Last answers

    def _join_last_answers(self) -> None:
        """Some harnesses make an agent that ran out of steps answer under another system prompt, without tools and
        with its calls rewritten as prose. Its history shows which conversation that ends: one whose last turn acted,
        and that nothing else goes on from. Titles and summaries of agents that were done end none."""
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
        """Two whole replies to the same request are two samples; and a cut one that something goes on from is alive."""
        dead, asked_later = set(), set()
        some = any(
            not turn.call.is_fully_delivered and not turn.next_turns for turn in self._turns
        )  # mostly none: nothing is compared
        for turn in reversed(self._turns) if some else ():
            call, digest = turn.call, turn.call.request_digest
            if not call.is_fully_delivered and not turn.next_turns and digest in asked_later:
                dead.add(call.exchange_id)
            asked_later.add(digest)
        return dead

    # Compactions

    def _find_compactions(self) -> set[str]:
        """Calls that saw an agent's history, and whose reply that agent then went on with instead."""
        found = set()
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
                found.add(turn.call.exchange_id)
        for turn in reversed(self._turns):  # a draft of a summary is part of it
            if self._is_side_call(turn) and any(later.call.exchange_id in found for later in turn.next_turns):
                found.add(turn.call.exchange_id)
        return found

    def _find_summarized_conversation(self, index: int) -> Conversation | None:
        """The talk that was under way and whose words stand most in a request that is one long text."""
        turn = self._turns[index]
        text = "\n".join(message_text(message) for message in turn.messages)
        latest = {
            earlier.conversation: earlier
            for earlier in self._turns[:index]
            if earlier.conversation.hint == turn.conversation.hint
            and (earlier.previous is not None or earlier.call.calls_tools)
        }
        latest.pop(turn.conversation, None)
        most, best = 0, None
        for earlier in latest.values():
            words = [
                message_text(message) for message in earlier.messages if message.role not in ("system", "developer")
            ]
            seen = sum(
                len(word) >= MIN_QUOTE_CHARS and word in text for word in (*words, earlier.call.reply_text.strip())
            )
            if seen > most:
                most, best = seen, earlier.conversation
        return best

    # Agents

    def _find_main_conversation(self) -> Conversation | None:
        """The first one that has tools, or simply the first, if none has."""
        unmarked = dict.fromkeys(
            turn.conversation for turn in self._turns if turn.call.exchange_id not in self._marked_roles
        )
        talks = [talk for talk in unmarked if not self._is_subagent(talk)]
        return next((talk for talk in talks if _has_tools(talk)), talks[0] if talks else None)

    def _restarts_main_agent(self, talk: Conversation) -> bool:
        """The main agent from a fresh start: the same prompt, and not while one of its tools was running."""
        main, first = self._main_conversation, talk.turns[0]
        if main is None or self._is_subagent(talk) or first.system_prompt != main.turns[0].system_prompt:
            return False
        return not any(
            turn.call.calls_tools and turn.call.seq < first.call.seq < later.call.seq
            for turn in main.turns
            for later in turn.next_turns
        )

    def _conversation_role(self, talk: Conversation) -> ExchangeRole:
        if talk is self._main_conversation:
            return "main"
        if all(turn.call.exchange_id in self._marked_roles for turn in talk.turns):
            return "auxiliary"
        equipped = _has_tools(talk) or (self._main_conversation is not None and not _has_tools(self._main_conversation))
        if equipped and self._restarts_main_agent(talk):
            return "main"
        goes_on = any(turn.next_turns for turn in talk.turns)
        return "subagent" if _has_tools(talk) or goes_on or self._is_subagent(talk) else "auxiliary"

    def _is_side_call(self, turn: Turn) -> bool:
        """Without tools, where the talk has some. The last turn may be: an agent that is made to answer now, perhaps
        under another system prompt where it was still at work."""
        call, before = turn.call, turn.previous
        if call.request.tools or not _has_tools(turn.conversation):
            return False
        answers = (
            before is not None
            and turn is turn.conversation.turns[-1]
            and (
                turn.system_prompt == before.system_prompt
                or (before.call.calls_tools and turn.extends_history_of(before))
            )
            and call.request.response_format.kind == before.call.request.response_format.kind
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
            talk = turn.conversation
            if talk in roles:
                continue
            role = roles[talk] = self._conversation_role(talk)
            if talk.hint is not None:
                agents[talk] = talk.hint
            elif role == "subagent":
                started += 1
                agents[talk] = f"agent-{started}"
            else:  # what is on the side is done for the main agent
                agents[talk] = self.main_agent
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


def _has_tools(talk: Conversation) -> bool:
    return any(turn.call.request.tools for turn in talk.turns)


def _is_ended_by(earlier: Turn, answer: Turn) -> bool:
    talk, asked = earlier.conversation, earlier.call.request
    return (
        talk.hint == answer.conversation.hint
        and earlier is talk.turns[-1]
        and not earlier.next_turns
        and earlier.call.calls_tools
        and bool(asked.tools)
        and asked.response_format.kind == answer.call.request.response_format.kind
        and answer.extends_history_of(earlier)
    )


def _continues_from_summary(later: Turn, summary: Turn, home: Conversation) -> bool:
    """`later` goes on with the summary's words instead of the history that they sum up."""
    begins = later is later.conversation.turns[0] and later.conversation.hint == home.hint
    if begins:  # whoever gets an agent's answer as its own task has another prompt
        begins = any(turn.system_prompt == later.system_prompt for turn in home.turns if turn is not summary)
    if (
        not (begins or later.conversation is home)
        or later.call.request_digest == summary.call.request_digest
        or not later.drops_work_of(summary)
    ):
        return False
    heard = "\n".join(message_text(message) for message in later.new_messages() if message.role != "tool")
    lines = [line for line in map(str.strip, summary.call.reply_text.splitlines()) if len(line) >= MIN_QUOTE_CHARS]
    carried = sum(len(line) for line in lines if line in heard)
    return bool(lines) and carried >= MIN_SUMMARY_SHARE * sum(map(len, lines))
