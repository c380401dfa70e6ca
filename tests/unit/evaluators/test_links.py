"""Which links are laid, over a list of what is carried and two runtimes that are prepared alike."""

import pytest

from polar.evaluators import links
from polar.evaluators.links import Carried
from tests.unit.evaluators.work import Place

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
async def test_a_link_leads_to_what_the_agent_could_show(place: Place, target: str, laid: bool) -> None:
    prepare = [{"type": "upload_file", "target": "/data/same", "content": "x"}]
    secret = [{"type": "upload_file", "target": "/data/graders", "content": "secret"}]
    work = await place.work("echo x > ../data/agents", runtime={"prepare": prepare, "eval_prepare": secret})
    await work.agent.put(b"made up", "/data/graders")
    carried = {f"/workspace/{path}": where for path, where in WORKSPACE.items()} | {"/workspace": None}
    found = await links.refuse(
        Carried(carried | {"/workspace/link": target}, frozenset({"/workspace"})),
        ["/workspace/link"],
        ["/workspace/.grader", "/grader/x"],
        agent=work.agent,
        fresh=await work.fresh(),
        scratch=work.scratch,
    )
    assert ([one.path for one in found] == []) == laid
    if "rader/" in target:
        assert found[0].into_grader
