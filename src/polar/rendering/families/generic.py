"""Any other model: text, with a think block where the template or the tokens have one."""

from polar.rendering.families.base import Signs
from polar.rendering.families.markup import Markup


class Generic(Markup):
    name = "generic"

    @classmethod
    def fits(cls, signs: Signs) -> bool:  # noqa: ARG003
        return True
