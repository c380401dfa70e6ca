"""Templates' sandbox gives the answers of Jinja's own, whatever it knows beforehand."""

import jinja2
import pytest
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from polar.rendering.template import ChatTemplate, TemplateError, ToolSpec, _Sandbox

OURS, THEIRS = _Sandbox(), ImmutableSandboxedEnvironment()
LOOP = LoopContext([1, 2], jinja2.Undefined)
LOOP.__next__()
OBJECTS = [
    {"role": "user", "items": 1, "_x": 2, "__class__": 3},
    ToolSpec(name="f"),
    "text",
    LOOP,
    Namespace(found=True, format="text".format),
    ["a"],
    7,
    None,
    len,
]
NAMES = sorted(
    {name for obj in OBJECTS for name in dir(type(obj))}
    | {"role", "items", "_x", "name", "found", "format", "missing", "mro", "__class__", "_iterable"}
)


@pytest.mark.parametrize("obj", OBJECTS, ids=lambda obj: type(obj).__name__)
@pytest.mark.parametrize("way", ["getattr", "getitem"])
def test_every_name_is_answered_alike(obj: object, way: str) -> None:
    for name in NAMES:
        ours, theirs = getattr(OURS, way)(obj, name), getattr(THEIRS, way)(obj, name)
        assert type(ours) is type(theirs), name
        if not isinstance(ours, jinja2.Undefined) and not callable(ours):
            assert ours == theirs, name
        elif isinstance(ours, jinja2.Undefined):
            assert ours._undefined_exception is theirs._undefined_exception, name


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{% for m in messages %}{{ loop.__init__.__globals__ }}{% endfor %}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{% set ns = namespace(f=1) %}{{ ns.__class__.__mro__ }}",
    ],
)
def test_templates_stay_boxed_in(source: str) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(source).render([{"role": "user", "content": "Hi"}])
