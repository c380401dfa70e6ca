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
from polar.harnesses.base import Knowledge, Mark
from polar.trajectory.conversations import Call, Talk, Turn, call_of, find, text_of
from polar.trajectory.types import TRAINABLE_ROLES, ExchangeRole

__all__ = ["Call", "Knowledge", "Labelled", "Mark", "Overrides", "assign", "call_of"]

MAIN = "main"
TELLING = 20
"""Characters: a shorter text may stand in two places by chance."""
CARRIED = 0.25
"""How much of a summary turns up in the agent's next prompt, at least: some harnesses cut its preamble off."""


class Labelled(NamedTuple):
    role: ExchangeRole
    agent_id: str


class Overrides(Struct, frozen=True):
    """What a task's owner says of roles, in the session's metadata."""

    roles: dict[str, ExchangeRole] = field(default_factory=dict)
    """By exchange id; or by agent id, for all of the agent's turns and compactions."""

    trainable_roles: frozenset[ExchangeRole] = TRAINABLE_ROLES

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> "Overrides":
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


NO_OVERRIDES = Overrides()


def assign(
    calls: Sequence[Call], *, known: Knowledge | None = None, overrides: Overrides = NO_OVERRIDES
) -> dict[str, Labelled]:
    """By exchange id. `calls` are all of a session's."""
    # Nothing is known of what an interrupted call asked, so it takes no part in what the others' structure says.
    session = _Session([call for call in calls if call.status != "interrupted"], known or Knowledge())
    labels = session.labels()
    for call in calls:
        if call.status == "interrupted":
            labels[call.exchange_id] = Labelled("retry", session.main_agent)
    for exchange_id, label in labels.items():
        role = label.role
        if label.agent_id in overrides.roles and role not in ("retry", "auxiliary"):
            role = overrides.roles[label.agent_id]
        labels[exchange_id] = Labelled(overrides.roles.get(exchange_id, role), label.agent_id)
    return labels


class _Session:
    def __init__(self, calls: Sequence[Call], known: Knowledge) -> None:
        self._known = known
        self._found: dict[tuple[str, str], bool] = {}  # which words stand in which system prompt
        self._turns = find(calls, self._hint)
        self._marked = {turn.call.exchange_id: mark.role for turn in self._turns if (mark := self._mark(turn))}
        self._join_last_answers()
        self._dead = self._dead_attempts()
        self._compactions = self._find_compactions()
        self._main = self._main_talk()

    # What the harness says of itself

    def _hint(self, call: Call) -> str | None:
        return next((call.hints[name] for name in self._known.agents if call.hints.get(name)), None)

    def _mark(self, turn: Turn) -> Mark | None:
        call, said = turn.call, turn.messages
        last = text_of(said[-1]) if said and said[-1].role == "user" else ""
        for mark in self._known.marks:
            if (
                (mark.header is None or (mark.header in call.hints and mark.value in call.hints[mark.header]))
                and (mark.system is None or self._in_system(mark.system, turn.system))
                and (mark.last is None or mark.last in last)
            ):
                return mark
        return None

    def _in_system(self, words: str, system: str) -> bool:
        """A session has few system prompts, and they are long."""
        found = self._found.get((words, system))
        if found is None:
            found = self._found[words, system] = words in system
        return found

    def _is_subagent(self, talk: Talk) -> bool:
        own = [turn.call for turn in talk.turns if turn.call.exchange_id not in self._marked]
        return any(name in call.hints for call in own for name in self._known.subagents)

    # Last answers

    def _join_last_answers(self) -> None:
        """Some harnesses make an agent that ran out of steps answer under another system prompt, without tools and
        with its calls rewritten as prose. Its history shows which conversation that ends: one whose last turn acted,
        and that nothing else goes on from. Titles and summaries of agents that were done end none."""
        for index, turn in enumerate(self._turns):
            call = turn.call
            if turn.before is not None or len(turn.talk.turns) > 1 or call.request.tools:
                continue
            if call.exchange_id in self._marked or not any(message.role == "assistant" for message in turn.messages):
                continue
            ended = next((earlier for earlier in reversed(self._turns[:index]) if _is_ended_by(earlier, turn)), None)
            if ended is not None:
                turn.before = ended
                ended.next.append(turn)
                ended.talk.absorb(turn.talk)

    # Retries

    def _dead_attempts(self) -> set[str]:
        """Two whole replies to the same request are two samples; and a cut one that something goes on from is alive."""
        dead, asked_later = set(), set()
        some = any(not turn.call.whole and not turn.next for turn in self._turns)  # mostly none: nothing is compared
        for turn in reversed(self._turns) if some else ():
            call, digest = turn.call, turn.call.digest
            if not call.whole and not turn.next and digest in asked_later:
                dead.add(call.exchange_id)
            asked_later.add(digest)
        return dead

    # Compactions

    def _find_compactions(self) -> set[str]:
        """Calls that saw an agent's history, and whose reply that agent then went on with instead."""
        found = set()
        for index, turn in enumerate(self._turns):
            marked = self._marked.get(turn.call.exchange_id)
            if marked not in (None, "compaction") or turn.next or turn.call.acts:
                continue
            home = self._summarised(index) if turn.before is None else turn.talk
            if home is None:
                continue
            heir = next((later for later in self._turns[index + 1 :] if _inherits(later, turn, home)), None)
            if heir is not None:
                home.absorb(heir.talk)
            if heir is not None or marked:
                home.absorb(turn.talk)
                found.add(turn.call.exchange_id)
        for turn in reversed(self._turns):  # a draft of a summary is part of it
            if self._aside(turn) and any(later.call.exchange_id in found for later in turn.next):
                found.add(turn.call.exchange_id)
        return found

    def _summarised(self, index: int) -> Talk | None:
        """The talk that was under way and whose words stand most in a request that is one long text."""
        turn = self._turns[index]
        text = "\n".join(text_of(message) for message in turn.messages)
        latest = {
            earlier.talk: earlier
            for earlier in self._turns[:index]
            if earlier.talk.hint == turn.talk.hint and (earlier.before is not None or earlier.call.acts)
        }
        latest.pop(turn.talk, None)
        most, best = 0, None
        for earlier in latest.values():
            words = [text_of(message) for message in earlier.messages if message.role not in ("system", "developer")]
            seen = sum(len(word) >= TELLING and word in text for word in (*words, earlier.call.said.strip()))
            if seen > most:
                most, best = seen, earlier.talk
        return best

    # Agents

    def _main_talk(self) -> Talk | None:
        """The first one that has tools, or simply the first, if none has."""
        unmarked = dict.fromkeys(turn.talk for turn in self._turns if turn.call.exchange_id not in self._marked)
        talks = [talk for talk in unmarked if not self._is_subagent(talk)]
        return next((talk for talk in talks if _has_tools(talk)), talks[0] if talks else None)

    def _goes_on_anew(self, talk: Talk) -> bool:
        """The main agent from a fresh start: the same prompt, and not while one of its tools was running."""
        main, first = self._main, talk.turns[0]
        if main is None or self._is_subagent(talk) or first.system != main.turns[0].system:
            return False
        return not any(
            turn.call.acts and turn.call.seq < first.call.seq < later.call.seq
            for turn in main.turns
            for later in turn.next
        )

    def _role(self, talk: Talk) -> ExchangeRole:
        if talk is self._main:
            return "main"
        if all(turn.call.exchange_id in self._marked for turn in talk.turns):
            return "auxiliary"
        equipped = _has_tools(talk) or (self._main is not None and not _has_tools(self._main))
        if equipped and self._goes_on_anew(talk):
            return "main"
        goes_on = any(turn.next for turn in talk.turns)
        return "subagent" if _has_tools(talk) or goes_on or self._is_subagent(talk) else "auxiliary"

    def _aside(self, turn: Turn) -> bool:
        """Without tools, where the talk has some. The last turn may be: an agent that is made to answer now, perhaps
        under another system prompt where it was still at work."""
        call, before = turn.call, turn.before
        if call.request.tools or not _has_tools(turn.talk):
            return False
        answers = (
            before is not None
            and turn is turn.talk.turns[-1]
            and (turn.system == before.system or (before.call.acts and turn.keeps(before)))
            and call.request.response_format.kind == before.call.request.response_format.kind
        )
        return not answers

    @property
    def main_agent(self) -> str:
        return MAIN if self._main is None or self._main.hint is None else self._main.hint

    def labels(self) -> dict[str, Labelled]:
        roles: dict[Talk, ExchangeRole] = {}
        agents: dict[Talk, str] = {}
        started = 0
        for turn in self._turns:
            talk = turn.talk
            if talk in roles:
                continue
            role = roles[talk] = self._role(talk)
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
            role = roles[turn.talk]
            if name in self._dead:
                role = "retry"
            elif name in self._marked:
                role = self._marked[name]
            elif name in self._compactions:
                role = "compaction"
            elif self._aside(turn):
                role = "auxiliary"
            labels[name] = Labelled(role, agents[turn.talk])
        return labels


def _has_tools(talk: Talk) -> bool:
    return any(turn.call.request.tools for turn in talk.turns)


def _is_ended_by(earlier: Turn, answer: Turn) -> bool:
    talk, asked = earlier.talk, earlier.call.request
    return (
        talk.hint == answer.talk.hint
        and earlier is talk.turns[-1]
        and not earlier.next
        and earlier.call.acts
        and bool(asked.tools)
        and asked.response_format.kind == answer.call.request.response_format.kind
        and answer.keeps(earlier)
    )


def _inherits(later: Turn, summary: Turn, home: Talk) -> bool:
    """`later` goes on with the summary's words instead of the history that they sum up."""
    begins = later is later.talk.turns[0] and later.talk.hint == home.hint
    if begins:  # whoever gets an agent's answer as its own task has another prompt
        begins = any(turn.system == later.system for turn in home.turns if turn is not summary)
    if not (begins or later.talk is home) or later.call.digest == summary.call.digest or not later.drops(summary):
        return False
    heard = "\n".join(text_of(message) for message in later.fresh() if message.role != "tool")
    lines = [line for line in map(str.strip, summary.call.said.splitlines()) if len(line) >= TELLING]
    carried = sum(len(line) for line in lines if line in heard)
    return bool(lines) and carried >= CARRIED * sum(map(len, lines))
