"""Which links are laid, over a list of what is carried and two runtimes that are prepared alike."""

from typing import Any, cast

import pytest

from polar.evaluators.base import UngradableWorkError
from polar.evaluators.transfer import links
from polar.evaluators.transfer.links import TransferredEntries
from polar.runtimes.base import CommandResult, Runtime, SandboxError
from polar.testing.grading import WorkFactory

WORKSPACE = {"a": None, "a/file": None, "b": "a", "lib": "usr/lib", "usr": None, "usr/lib": None, "usr/lib/x": None}


@pytest.mark.parametrize(
    ("target", "laid"),
    [
        ("a/file", True),
        ("b/file", True),
        ("./b/../a/file", True),
        ("lib/x", True),
        ("a", True),
        ("nothing", False),
        ("link", False),
        ("a/nothing", False),
        (".grader/expected", False),
        ("b/../.grader/expected", False),
        (".grader", False),
        (".", False),
        ("..", False),
        ("../../../x", False),
        ("../data/same", True),
        ("../data/agents", False),
        ("../data/graders", False),
        ("../data", False),
        ("../data/../data/same", False),
        ("../grader/x", False),
        ("a\nfile", False),
    ],
)
async def test_a_link_leads_to_what_the_agent_could_show(place: WorkFactory, target: str, laid: bool) -> None:
    prepare = [{"type": "upload_file", "target": "/data/same", "content": "x"}]
    secret = [{"type": "upload_file", "target": "/data/graders", "content": "secret"}]
    work = await place.create_work("echo x > ../data/agents", runtime={"prepare": prepare, "eval_prepare": secret})
    await work.agent_runtime.put(b"made up", "/data/graders")
    carried = {f"/workspace/{path}": where for path, where in WORKSPACE.items()} | {"/workspace": None}
    found = await links.find_refused_links(
        TransferredEntries(carried | {"/workspace/link": target}, frozenset({"/workspace"})),
        ["/workspace/link"],
        ["/workspace/.grader", "/grader/x"],
        agent=work.agent_runtime,
        fresh=await work.create_fresh_runtime(),
        scratch=work.scratch,
    )
    assert ([one.path for one in found] == []) == laid
    if "rader/" in target:
        assert found[0].enters_grader_paths


class Exhausted:
    """A runtime whose commands end as given, within any limit that they are run with."""

    def __init__(self, runtime: Runtime, end: CommandResult) -> None:
        self._runtime = runtime
        self._end = end

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    async def run(self, _: list[str], *, timeout: float | None = None, **__: Any) -> CommandResult:
        assert timeout is not None, "what runs inside may hold it forever"
        return self._end


TOO_LONG = CommandResult(None, 1.0, timed_out=True)
TOO_MUCH = CommandResult(None, 1.0, out_of_memory=True)
STOPPED = CommandResult(None, 1.0)


@pytest.mark.parametrize(
    ("end", "live", "error"),
    [
        (TOO_LONG, True, UngradableWorkError),
        (TOO_MUCH, True, UngradableWorkError),
        (TOO_LONG, False, SandboxError),
        (TOO_MUCH, False, SandboxError),
        (STOPPED, True, SandboxError),
    ],
)
async def test_links_that_can_not_be_resolved(
    place: WorkFactory, end: CommandResult, live: bool, error: type[Exception]
) -> None:
    """In the agent's own runtime, what holds the look up is the agent's doing; in one that it was never in, not."""
    work = await place.create_work()
    fresh = cast("Runtime", Exhausted(work.agent_runtime, end))
    with pytest.raises(error):
        await links.find_refused_links(
            TransferredEntries({"/workspace/link": "/usr/x"}, frozenset({"/workspace"})),
            ["/workspace/link"],
            ["/workspace/.grader"],
            agent=fresh if live else work.agent_runtime,
            fresh=fresh,
            scratch=work.scratch,
        )
