"""Any other model: text, with a think block where the template or the tokens have one."""

from polar.rendering.families.base import FamilySigns
from polar.rendering.families.markup import MarkupFamily


class Generic(MarkupFamily):
    name = "generic"

    @classmethod
    def matches(cls, signs: FamilySigns) -> bool:  # noqa: ARG003
        return True
