"""Roles and agents, from made-up sessions: one for each thing that harnesses do."""

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar import ids
from polar.errors import ConfigError
from polar.records.spans import TRAINABLE_ROLES
from polar.trajectory.conversations import link_turns
from polar.trajectory.roles import CallLabel, CallPatterns, ModelCall, RoleOverrides, RolePattern, assign_roles
from polar.types import Message, Part, Reply, Request, ResponseFormat, Text, Tool, ToolCall, ToolResult

TOOLS = [Tool("bash"), Tool("agent")]
SYSTEM = "You are an agent that writes code."
SUMMARY = "The user wants two files.\nThe first file was written and checked.\nThe second one is still to be written."


def system(text: str = SYSTEM) -> Message:
    return Message("system", [Text(text)])


def user(text: str) -> Message:
    return Message("user", [Text(text)])


class Session:
    """Writes a session down, call by call."""

    def __init__(self) -> None:
        self.calls: list[ModelCall] = []

    def ask(
        self,
        messages: list[Message],
        says: str = "",
        *,
        acts: bool = False,
        tools: list[Tool] | None = None,
        hints: dict[str, str] | None = None,
        whole: bool = True,
        echo: bool = True,
        json: bool = False,
    ) -> list[Message]:
        """A call; returns the history that the harness has after it. With `echo` off, ids are not sent back."""
        seq = len(self.calls)
        name = f"x{seq:024x}"
        parts: list[Part] = [Text(says)] if says else []
        if acts:
            parts.append(ToolCall(ids.make_call_id(name, 0), "bash", f'{{"command": "step {seq}"}}'))
        request = Request("model", list(messages), TOOLS if tools is None else tools)
        if json:
            request.response_format = ResponseFormat("json_object")
        self.calls.append(
            ModelCall(
                exchange_id=name,
                seq=seq,
                status="complete" if whole else "partial",
                num_sampled=10,
                num_delivered=10 if whole else 4,
                parent=None,
                hints=hints or {},
                request=request,
                reply=Reply(name, "model", 0, parts),
            )
        )
        sent = [ToolCall("call", part.name, part.arguments) if isinstance(part, ToolCall) else part for part in parts]
        turn = Message("assistant", parts if echo else sent)
        result = Message("tool", [ToolResult("call", [Text(f"The result of step {seq}.")])])
        return [*messages, turn, result] if acts else [*messages, turn]

    def interrupt(self) -> None:
        """A call whose gateway was killed."""
        seq = len(self.calls)
        self.calls.append(ModelCall(f"x{seq:024x}", seq, "interrupted", 0, 0, None, {}, Request("", []), None))

    def roles(self, **options: Any) -> list[str]:
        labels = assign_roles(self.calls, **options)
        return [labels[call.exchange_id].role for call in self.calls]

    def agents(self, **options: Any) -> list[str]:
        labels = assign_roles(self.calls, **options)
        return [labels[call.exchange_id].agent_id for call in self.calls]


@pytest.fixture
def session() -> Session:
    return Session()


def begun(session: Session, **options: Any) -> list[Message]:
    """Two steps of the main agent."""
    history = session.ask([system(), user("Please write the two files.")], "First file.", acts=True, **options)
    return session.ask(history, "Second file, then.", acts=True, **options)


# Retries


def test_a_cut_reply_asked_for_again_is_dead(session: Session) -> None:
    start = [system(), user("Please write the two files.")]
    session.ask(start, "First", whole=False)
    session.ask(start, "First f", whole=False)
    session.ask(session.ask(start, "First file.", acts=True), "Done.")
    assert session.roles() == ["retry", "retry", "main", "main"]
    assert session.agents() == ["main"] * 4


def test_two_whole_replies_are_two_samples(session: Session) -> None:
    start = [system(), user("Please write the two files.")]
    session.ask(start, "First file.", acts=True)
    session.ask(session.ask(start, "The files.", acts=True), "Done.")
    assert session.roles() == ["main"] * 3
    assert session.agents() == ["main"] * 3


def test_a_cut_turn_that_goes_on_is_alive(session: Session) -> None:
    start = [system(), user("Please write the two files.")]
    kept = session.ask(start, "First", acts=True, whole=False)
    session.ask(start, "First file.", acts=True)
    session.ask(kept, "Done.")
    assert session.roles() == ["main"] * 3


def test_an_interrupted_call_takes_no_part(session: Session) -> None:
    """Of a call whose gateway was killed only the start is known: here one before all others, of an agent without
    tools, whose first conversation is the main one."""
    session.interrupt()
    history = session.ask([system(), user("What is two and two?")], "Four.", tools=[])
    session.interrupt()
    session.ask([*history, user("And three?")], "Five.", tools=[])
    assert session.roles() == ["retry", "main", "retry", "main"]
    assert session.agents() == ["main"] * 4


def test_an_interrupted_call_alone(session: Session) -> None:
    session.interrupt()
    assert session.roles() == ["retry"]


# Compaction


def test_the_history_and_an_instruction_without_tools(session: Session) -> None:
    history = begun(session)
    session.ask([*history, user("Sum this up for another model.")], SUMMARY, tools=[])
    session.ask(
        [system(), user(f"Please write the two files.\nWhat was done so far:\n{SUMMARY}")], "Second.", acts=True
    )
    assert session.roles() == ["main", "main", "compaction", "main"]
    assert session.agents() == ["main"] * 4


def test_with_tools_and_most_of_the_reply_cut_off(session: Session) -> None:
    history = begun(session)
    thoughts = "\n".join(f"Let me think about message number {number}." for number in range(8))
    session.ask([*history, user("Sum this up.")], f"<analysis>\n{thoughts}\n</analysis>\n{SUMMARY}")
    session.ask([system(), user(f"This goes on from before.\nSummary:\n{SUMMARY}")], "Second.", acts=True)
    assert session.roles() == ["main", "main", "compaction", "main"]


def test_the_history_as_one_text(session: Session) -> None:
    history = begun(session)
    told = "\n".join(str(message.parts) for message in history[1:]) + "\nPlease write the two files."
    session.ask([system("You sum up conversations."), user(told)], SUMMARY, tools=[])
    kept = session.ask([system(), user(f"Summary: {SUMMARY}"), *history[-2:]], "Second.", acts=True)
    session.ask(kept, "Done.")
    assert session.roles() == ["main", "main", "compaction", "main", "main"]
    assert session.agents() == ["main"] * 5


def test_the_summary_as_a_turn_of_the_model(session: Session) -> None:
    history = begun(session)
    session.ask([system("You sum up."), *history[1:], user("Sum this up.")], SUMMARY, tools=[])
    after = [system(), user("What was done?"), Message("assistant", [Text(SUMMARY)]), user("Go on.")]
    session.ask(session.ask(after, "Second.", acts=True), "Done.")
    assert session.roles() == ["main", "main", "compaction", "main", "main"]
    assert session.agents() == ["main"] * 5


def test_a_draft_is_part_of_it(session: Session) -> None:
    history = begun(session)
    draft = session.ask([*history, user("Sum this up.")], "A first and poor summary of it all.", tools=[])
    session.ask([*draft, user("Is anything missing? Write it again.")], SUMMARY, tools=[])
    session.ask([system(), user(SUMMARY)], "Second.", acts=True)
    assert session.roles() == ["main", "main", "compaction", "compaction", "main"]


def test_a_subagents_own(session: Session) -> None:
    history = begun(session)
    other = system("You are a helper of an agent.")
    work = session.ask([other, user("Look for the file that is missing.")], "Looking.", acts=True)
    session.ask([*work, user("Sum this up.")], SUMMARY, tools=[])
    session.ask([other, user(SUMMARY)], "Found it.")
    session.ask(history, "Done.")
    assert session.roles() == ["main", "main", "subagent", "compaction", "subagent", "main"]
    assert session.agents() == ["main", "main", "agent-1", "agent-1", "agent-1", "main"]


def test_an_answer_that_is_another_agents_task_is_none(session: Session) -> None:
    history = begun(session)
    session.ask(history, SUMMARY)
    session.ask([system("You review the work of others."), user(f"Review this:\n{SUMMARY}")], "Fine.", acts=True)
    assert session.roles() == ["main", "main", "main", "subagent"]
    assert session.agents()[-1] == "agent-1"


def test_a_turn_that_acts_is_none(session: Session) -> None:
    session.ask(begun(session), SUMMARY, acts=True)
    session.ask([system(), user(f"You were stopped. You had said:\n{SUMMARY}")], "Second.", acts=True)
    assert session.roles() == ["main"] * 4


# On the side


def test_a_title(session: Session) -> None:
    session.ask([system("You write titles."), user("Please write the two files.")], "Two files", tools=[])
    begun(session)
    assert session.roles() == ["auxiliary", "main", "main"]
    assert session.agents() == ["main"] * 3


def test_a_check_in_between(session: Session) -> None:
    history = begun(session)
    session.ask([*history, user("Whose turn is it?")], "model", tools=[])
    session.ask(history, "Done.")
    assert session.roles() == ["main", "main", "auxiliary", "main"]


def test_a_check_at_the_end(session: Session) -> None:
    history = session.ask(begun(session), "Done.")
    session.ask([*history, user("Whose turn is it?")], "user", tools=[], json=True)
    assert session.roles() == ["main", "main", "main", "auxiliary"]


def test_an_agent_that_is_made_to_answer(session: Session) -> None:
    history = begun(session)
    session.ask([*history, user("No steps are left: answer now.")], "It is half done.", tools=[])
    assert session.roles() == ["main"] * 3


STUCK = "An agent tried to answer, but got stuck. You are tasked with providing an answer instead."


def as_prose(history: list[Message]) -> list[Message]:
    """As smolagents writes its calls and their results."""
    told = []
    for message in history:
        if message.role == "assistant":
            calls = [part for part in message.parts if isinstance(part, ToolCall)]
            texts = [part for part in message.parts if isinstance(part, Text)]
            told += [Message("assistant", [part]) for part in texts]
            told += [Message("assistant", [Text(f"Calling tools: {call.name} {call.arguments}")]) for call in calls]
        elif message.role == "tool":
            results = [part for part in message.parts if isinstance(part, ToolResult)]
            told += [
                user(f"Observation: {text.text}") for part in results for text in part.parts if isinstance(text, Text)
            ]
        else:
            told.append(message)
    return told


def prose_steps(session: Session, start: list[Message], steps: int, says: str) -> list[Message]:
    for _ in range(steps):
        start = as_prose(session.ask(start, says, acts=True))
    return start


@pytest.mark.parametrize("says", ["", "Looking."], ids=["calls alone", "words and calls"])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_a_last_answer_under_another_prompt(session: Session, steps: int, says: str) -> None:
    """smolagents after max_steps: the history goes on, and the system prompt is another one."""
    history = prose_steps(session, [system(), user("Please write the two files.")], steps, says)
    post = user("Based on the above, please answer this: Please write the two files.")
    session.ask([system(STUCK), *history[1:], post], "They are half done.", tools=[])
    assert session.roles() == ["main"] * (steps + 1)
    assert session.agents() == ["main"] * (steps + 1)


def test_a_last_answer_of_a_subagent(session: Session) -> None:
    history = begun(session)
    other = [system("You help."), user("Look for the file that is missing.")]
    work = prose_steps(session, other, 2, "")
    session.ask([system(STUCK), *work[1:], user("Answer now.")], "It is nowhere.", tools=[])
    session.ask(history, "Done.")
    assert session.roles() == ["main", "main", "subagent", "subagent", "subagent", "main"]
    assert session.agents() == ["main", "main", "agent-1", "agent-1", "agent-1", "main"]


def test_a_title_of_the_whole_history_is_none(session: Session) -> None:
    """Of an agent that was done; of one that goes on; and without what the agent did."""
    history = prose_steps(session, [system(), user("Please write the two files.")], 2, "")
    title, ask = system("You write titles."), user("Write a title.")
    session.ask([title, *history[1:], ask], "Two files", tools=[])
    session.ask([title, history[1], ask], "Two files", tools=[])
    done = session.ask(history, "Done.")
    session.ask([title, *done[1:], ask], "Two files", tools=[])
    assert session.roles() == ["main", "main", "auxiliary", "auxiliary", "main", "auxiliary"]


def test_a_check_under_another_prompt_is_none(session: Session) -> None:
    history = prose_steps(session, [system(), user("Please write the two files.")], 2, "")
    session.ask([system("You check."), *history[1:], user("Is it done?")], "{}", tools=[], json=True)
    assert session.roles() == ["main", "main", "auxiliary"]


def test_a_commit_message_where_nobody_has_tools(session: Session) -> None:
    history = session.ask([system(), user("Please write the two files.")], "Here they are.", tools=[])
    session.ask([system("You write commit messages."), user("diff --git a/one b/one")], "Add two files", tools=[])
    session.ask([*history, user("Now the tests.")], "And the tests.", tools=[])
    assert session.roles() == ["main", "auxiliary", "main"]


# Agents


def test_a_subagent_with_a_prompt_of_its_own(session: Session) -> None:
    history = begun(session, echo=False)
    work = session.ask([system("You help."), user("Look for the file.")], "Looking.", acts=True, echo=False)
    session.ask(history, "Meanwhile.", acts=True, echo=False)
    session.ask(work, "Found it.", echo=False)
    assert session.roles() == ["main", "main", "subagent", "main", "subagent"]
    assert session.agents() == ["main", "main", "agent-1", "main", "agent-1"]


def test_a_subagent_with_the_same_prompt(session: Session) -> None:
    history = begun(session)
    session.ask([system(), user("Look for the file.")], "Found it.")
    session.ask(history, "Done.")
    session.ask([system(), user("Another task, from the beginning.")], "Yes.")
    assert session.roles() == ["main", "main", "subagent", "main", "main"]
    assert session.agents() == ["main", "main", "agent-1", "main", "main"]


def test_a_subagent_without_tools(session: Session) -> None:
    history = begun(session)
    talk = session.ask([system("You are a sceptic."), user("Is this right?")], "Why two files?", tools=[])
    session.ask([*talk, user("There were two in the task.")], "I see.", tools=[])
    session.ask(history, "Done.")
    assert session.roles() == ["main", "main", "subagent", "subagent", "main"]


def test_what_the_harness_says_of_its_agents(session: Session) -> None:
    known = CallPatterns(agent_headers=("thread",), subagent_headers=("parent",))
    history = begun(session, hints={"thread": "t1"})
    fork = [*history, user("You are a copy: look for the file.")]
    session.ask(fork, "Found it.", hints={"thread": "t2", "parent": "t1"})
    session.ask(history, "Done.", hints={"thread": "t1"})
    session.ask([system(), user("Another task.")], "Yes.", hints={"thread": "t3"})
    assert session.roles(patterns=known) == ["main", "main", "subagent", "main", "main"]
    assert session.agents(patterns=known) == ["t1", "t1", "t2", "t1", "t3"]


def test_the_main_agent_is_not_the_first_that_is_known_better(session: Session) -> None:
    known = CallPatterns(
        subagent_headers=("parent",),
        role_patterns=(
            RolePattern("auxiliary", last_user_message="Warm up"),
            RolePattern("compaction", header="kind", header_text="compact"),
        ),
    )
    session.ask([system("You warm up."), user("Warm up.")], "Warm.")
    session.ask([system("You help."), user("Go.")], "Going.", hints={"parent": "p"})
    history = begun(session)
    session.ask(history, "Short.", hints={"kind": "compact"})
    assert session.roles(patterns=known) == ["auxiliary", "subagent", "main", "main", "compaction"]
    assert session.agents(patterns=known) == ["main", "agent-1", "main", "main", "main"]


def test_a_helper_that_calls_itself_a_subagent(session: Session) -> None:
    known = CallPatterns(
        subagent_headers=("sub",), role_patterns=(RolePattern("compaction", header="sub", header_text="compact"),)
    )
    history = begun(session)
    session.ask([*history, user("Sum this up.")], SUMMARY, tools=[], hints={"sub": "compact"})
    session.ask(history, "Done.")
    assert session.roles(patterns=known) == ["main", "main", "compaction", "main"]


def test_a_file_that_quotes_a_mark_is_none(session: Session) -> None:
    known = CallPatterns(role_patterns=(RolePattern("auxiliary", last_user_message="The result of step"),))
    session.ask(begun(session), "Done.")
    assert session.roles(patterns=known) == ["main"] * 3


def test_a_history_that_is_rewritten_every_turn(session: Session) -> None:
    """The text comes back trimmed, and notes come and go: only quoted words hold it together."""
    history = begun(session)
    other, start = system("You are a sceptic."), user("Is this right?")
    session.ask([other, start, user("12 % of the context is used.")], "Why two files?\n", tools=[])
    quoted = Message("assistant", [Text("Why two files?")])
    session.ask([other, start, quoted, user("15 % of the context is used.")], "I see.\n", tools=[])
    session.ask(history, "Done.")
    assert session.roles() == ["main", "main", "subagent", "subagent", "main"]
    assert session.agents() == ["main", "main", "agent-1", "agent-1", "main"]


def test_a_parent_that_the_gateway_knows(session: Session) -> None:
    history = session.ask([system(), user("Please write the two files.")], acts=True, echo=False)
    session.ask([system(f"{SYSTEM} It is Tuesday."), *history[1:]], "Done.")
    assert session.agents() == ["main", "agent-1"]
    session.calls[1] = msgspec.structs.replace(session.calls[1], parent=session.calls[0].exchange_id)
    assert session.agents() == ["main", "main"]


def test_of_two_samples_the_one_delivered_whole_goes_on(session: Session) -> None:
    start = [system(), user("Please write the two files.")]
    history = session.ask(start, "First file.", acts=True, echo=False)
    session.ask(start, "First", whole=False)
    session.ask(history, "Done.")
    whole, cut, last = link_turns((call, None) for call in session.calls)
    assert last.previous is whole
    assert cut.conversation is whole.conversation


def test_a_prompt_without_messages(session: Session) -> None:
    for prompt in ("Once", "Once upon", "A time"):
        session.ask([], "upon a time")
        session.calls[-1].request.prompt = prompt
        session.calls[-1].request.tools = []
    assert session.roles() == ["main"] * 3


# Overrides


def test_the_tasks_owner_has_the_last_word(session: Session) -> None:
    history = begun(session)
    session.ask([system("You help."), user("Look for the file.")], "Looking.", acts=True)
    session.ask(history, "Done.")
    first = session.calls[0].exchange_id
    overrides = RoleOverrides.from_metadata(
        {"roles": {"agent-1": "auxiliary", first: "compaction"}, "trainable_roles": ["main"], "n": 1}
    )
    assert session.roles(overrides=overrides) == ["compaction", "main", "auxiliary", "main"]
    assert overrides.trainable_roles == {"main"}


def test_an_agents_dead_attempts_stay_dead(session: Session) -> None:
    start = [system(), user("Please write the two files.")]
    session.ask(start, "Fir", whole=False)
    session.ask(start, "First.")
    assert session.roles(overrides=RoleOverrides({"main": "subagent"})) == ["retry", "subagent"]


def test_without_overrides() -> None:
    assert RoleOverrides.from_metadata({"harness": "pi"}) == RoleOverrides({}, TRAINABLE_ROLES)


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"roles": {"agent-1": "boss"}}, "boss"),
        ({"roles": ["main"]}, "roles"),
        ({"trainable_roles": "main"}, "trainable_roles"),
        ({"trainable_roles": ["boss"]}, "boss"),
    ],
)
def test_overrides_that_cannot_be_used(metadata: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match="roles are main, subagent") as caught:
        RoleOverrides.from_metadata(metadata)
    assert said in str(caught.value)


# Whatever the session


@st.composite
def sessions(draw: st.DrawFn) -> Session:
    """Talks that start, fork, are cut and asked again, in any order."""
    session = Session()
    prompts = st.sampled_from([SYSTEM, "You help.", "You write titles."])
    histories: list[list[Message]] = []
    for number in range(draw(st.integers(1, 8))):
        known = draw(st.sampled_from([None, *histories]))
        asked = [system(draw(prompts)), user(f"Task number {draw(st.integers(0, 3))}.")] if known is None else known
        history = session.ask(
            asked,
            draw(st.sampled_from(["", "A word.", SUMMARY, f"Something new, said in step {number}."])),
            acts=draw(st.booleans()),
            tools=draw(st.sampled_from([[], TOOLS])),
            whole=draw(st.booleans()),
            echo=draw(st.booleans()),
            hints=draw(st.sampled_from([{}, {"thread": "t1"}, {"thread": "t2", "parent": "t1"}])),
        )
        histories += [asked, history, [*history, user("Go on.")]]
    return session


KNOWN = CallPatterns(agent_headers=("thread",), subagent_headers=("parent",))


@given(sessions(), st.randoms(use_true_random=False))
def test_one_label_each_in_any_order(session: Session, random: Any) -> None:
    labels = assign_roles(session.calls, patterns=KNOWN)
    assert set(labels) == {call.exchange_id for call in session.calls}
    shuffled = list(session.calls)
    random.shuffle(shuffled)
    assert assign_roles(shuffled, patterns=KNOWN) == labels


@given(sessions())
def test_what_is_unrelated_changes_nothing(session: Session) -> None:
    """A stranger that comes last, with words of its own, and (where nobody has tools) without tools."""
    before: dict[str, CallLabel] = assign_roles(session.calls, patterns=KNOWN)
    tools = TOOLS if any(call.request.tools and "parent" not in call.hints for call in session.calls) else []
    history = session.ask([system("A stranger's prompt."), user("A strange task.")], "Strange.", acts=True, tools=tools)
    session.ask(history, "Stranger still.", tools=tools)
    after = assign_roles(session.calls, patterns=KNOWN)
    assert {name: after[name] for name in before} == before


@given(sessions())
def test_the_dead_have_an_heir(session: Session) -> None:
    labels = assign_roles(session.calls, patterns=KNOWN)
    for call in session.calls:
        if labels[call.exchange_id].role == "retry":
            assert not call.is_fully_delivered
            assert any(later.seq > call.seq and later.request_digest == call.request_digest for later in session.calls)


@given(sessions())
def test_agents_are_counted_as_they_appear(session: Session) -> None:
    labels = assign_roles(session.calls, patterns=KNOWN)
    agents = dict.fromkeys(labels[call.exchange_id].agent_id for call in session.calls)
    numbers = [int(name.removeprefix("agent-")) for name in agents if name.startswith("agent-")]
    assert all(later == earlier + 1 for earlier, later in pairwise([0, *numbers]))
