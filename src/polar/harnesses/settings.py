"""A task's `agent.settings`, read as the typed settings of a preset."""

from typing import Any, TypeVar

import msgspec
from msgspec import Struct, field

from polar.errors import ConfigError


class CommonSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """What every preset takes."""

    args: list[str] = field(default_factory=list)
    """Further words for its command line."""

    json: bool = True
    """Whether it writes its run as events, where it can; else what a person reads."""


SettingsT = TypeVar("SettingsT", bound=Struct)


def read_settings(harness: str, settings: dict[str, Any], kind: type[SettingsT]) -> SettingsT:
    try:
        return msgspec.convert(settings, kind)
    except msgspec.ValidationError as error:
        known = ", ".join(kind.__struct_fields__)
        raise ConfigError(f"The settings of {harness} can't be used: {error}. It takes: {known}.") from error
