"""Typed settings: polar.toml, overridden by the environment (POLAR_SECTION__KEY; lists and tables as JSON)."""

import difflib
import json
import logging
import os
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from operator import eq
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from polar.errors import ConfigError
from polar.types import SamplingParams
from polar.validation_errors import format_validation_errors

log = logging.getLogger(__name__)

ENVIRONMENT_PREFIX = "POLAR_"
DEFAULT_RUN = "default"
"""The run of whatever names none."""


Compat = Literal["polar", "nvidia"]
"""Whose meaning tasks have where rollout systems differ (records.task.TaskSemantics)."""

Port = Annotated[int, Field(ge=0, le=65535)]


def _check_http_url(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url!r} is no address: it begins with http:// or https://")
    return url


class SettingsSection(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


EngineOptions = TypeVar("EngineOptions", bound=SettingsSection)


class SamplingOverrides(SettingsSection):
    """What is sampled with, whatever the harness asks for. While training, the trainer decides, not the harness."""

    temperature: float | None = Field(None, ge=0, le=10, description="divides the logits")
    top_p: float | None = Field(
        None, gt=0, le=1, description="sample from the likeliest tokens that together have this probability"
    )
    top_k: int | None = Field(None, ge=0, description="sample from so many of the likeliest tokens; 0: from all")
    min_p: float | None = Field(
        None, ge=0, le=1, description="leave out tokens less likely than this share of the likeliest one"
    )
    presence_penalty: float | None = Field(
        None, description="subtracted from the logits of tokens that were sampled before"
    )
    frequency_penalty: float | None = Field(None, description="the same, for each time that a token was sampled")
    repetition_penalty: float | None = Field(
        None, gt=0, description="divides the logits of tokens that stand in the context"
    )
    max_tokens: int | None = Field(None, gt=0, description="of a reply")

    def apply(self, sampling: SamplingParams) -> None:
        for name, value in self:
            if value is not None:
                setattr(sampling, name, value)


class PriceSettings(SettingsSection):
    """Of a million tokens, in any currency."""

    prompt: float = Field(ge=0, description="of tokens of prompts")
    sampled: float = Field(ge=0, description="of sampled tokens")
    cached: float | None = Field(None, ge=0, description="tokens of prompts that the engine had [default: as others]")


class EngineSettings(SettingsSection):
    kind: str = Field(
        "scripted",
        description="plug-in that speaks to it; with neither kind nor urls it is embedded, with urls alone vllm",
    )
    urls: list[Annotated[str, AfterValidator(_check_http_url)]] = Field(
        [], description="replicas of the engine; an empty list: a trainer adds them later"
    )
    model: str | None = Field(None, description="its name at the engine; for the embedded engine a folder")
    tokenizer: str | None = Field(
        None, description="folder or name of the model's tokenizer and chat template [default: as the engine says]"
    )
    api_key: str | None = Field(None, repr=False, description="sent to the engine")
    render: Literal["gateway", "engine"] = Field(
        "gateway", description="who renders prompts; the engine does in any case what only it can (pictures, say)"
    )
    image_urls: Literal["pass", "refuse"] = Field(
        "refuse",
        description="pictures and files by address, which the engine would fetch; data: URLs always pass",
    )
    continuation: Literal["auto", "sampled", "off"] = Field(
        "auto", description="how prompts use recorded token ids: docs/continuation.md"
    )
    template_kwargs: dict[str, Any] = Field({}, description="variables of the chat template, such as enable_thinking")
    logprobs: bool = Field(
        True, description="false: the engine is not asked for log-probabilities, and the trainer recomputes them"
    )
    sampling: SamplingOverrides = SamplingOverrides()
    timeout: float = Field(600, gt=0, description="seconds without a byte from the engine before a call is given up")
    options: dict[str, Any] = Field({}, description="settings of the engine's own kind")
    price: PriceSettings | None = Field(None, description="what its tokens cost: for a collection's budget")
    max_inflight: int = Field(512, gt=0, description="calls at one replica before sessions move to another")

    @field_validator("urls", mode="before")
    @classmethod
    def _wrap_single_url(cls, urls: Any) -> Any:
        return [urls] if isinstance(urls, str) else urls

    def parse_options(self, kind: type[EngineOptions]) -> EngineOptions:
        """As the engine's own kind has them. Raises ConfigError."""
        try:
            return kind.model_validate(self.options)
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"]))
            known = ", ".join(kind.model_fields)
            raise ConfigError(f"[engine.options] {where}: {problem['msg']}; known: {known}.") from error


class GatewaySettings(SettingsSection):
    host: str = Field("127.0.0.1", description="the data plane's address")
    port: Port = Field(8100, description="of the data plane; 0 takes a free one")
    max_body: int | None = Field(
        None,
        gt=0,
        description="bytes of a request; larger ones get 413 [default: what the context can hold, 16 to 64 MiB]",
    )
    keep_alive: float = Field(10, gt=0, description="seconds of silence before a stream gets a keep-alive")
    grace: float = Field(2, ge=0, description="seconds that a generation goes on after its harness went away")


class ServerSettings(SettingsSection):
    host: str = Field("127.0.0.1", description="the control plane's address; any but loopback takes a token")
    port: Port = Field(8080, description="of the control plane; 0 takes a free one")
    token: str | None = Field(None, repr=False, description="of operators and trainers")
    node_token: str | None = Field(None, repr=False, description="of nodes that join [default: the token]")
    compat: Compat = Field("polar", description="whose meaning tasks have where systems differ: for bridges of others")
    attempts: int = Field(3, gt=0, description="tries of a session, where the platform fails")
    lease_seconds: float = Field(10, gt=0, description="that a node may be silent before others get its sessions")
    beat_seconds: float = Field(
        2, gt=0, validate_default=True, description="between two signs of life of a node; a third of a lease at most"
    )
    callback_hosts: list[str] = Field(
        [], description="HOST or HOST:PORT that tasks may name in callback_url [default: this machine's loopback]"
    )
    callback_hours: float = Field(24, gt=0, description="after which a callback that nobody acknowledges is given up")
    retention_hours: float | None = Field(
        None, gt=0, description="of service, that ended tasks and their sessions are kept [default: for ever]"
    )

    @field_validator("beat_seconds")
    @classmethod
    def _check_beat_interval(cls, beat: float, info: ValidationInfo) -> float:
        """One that is late, or is lost, must not cost a node all that it runs."""
        lease = info.data.get("lease_seconds")
        if lease is not None and 3 * beat > 1.001 * lease:  # but for rounding
            raise ValueError(
                f"{beat:g} is more than a third of lease_seconds ({lease:g}): set a smaller one, "
                f"or lease_seconds to {3 * beat:g} or more"
            )
        return beat


class StoreSettings(SettingsSection):
    url: str | None = Field(  # it may hold a password
        None, repr=False, description="sqlite:PATH or postgresql://... [default: SQLite in the data folder]"
    )
    durability: Literal["process", "power"] = Field(
        "process", description="what a durable call survives: the end of the process, or also a power loss"
    )


class PrewarmSettings(SettingsSection):
    """Runtimes that stand ready before a task asks for one like them."""

    runtime: dict[str, Any] = Field(description="as in a task: backend, image, prepare, ...")
    harness: str | None = Field(None, description="mounted into them, from the cache of installed ones: NAME[@VERSION]")
    count: int = Field(2, gt=0, description="that stand ready")


class NodeSettings(SettingsSection):
    init_workers: int = Field(4, gt=0, description="runtimes that are made and prepared at the same time")
    ready_buffer: int = Field(4, gt=0, description="prepared ones that wait for a free run slot")
    run_workers: int = Field(16, gt=0, description="harnesses that run at the same time")
    postrun_workers: int = Field(4, gt=0, description="evaluations at the same time")
    drain_seconds: float = Field(
        20, ge=0, description="that running sessions may go on after SIGTERM, before others get them"
    )
    disk_mb: int | None = Field(None, gt=0, description="of each runtime, where a task names no limit of its own")
    runtimes: list[str] = Field([], description="backends that tasks may use [default: all that work here]")
    prewarm: list[PrewarmSettings] = []
    harness_cache: str | None = Field(None, description="where harnesses are installed [default: the user's cache]")


class JudgeSettings(SettingsSection):
    """A model that judges, behind the Chat API of OpenAI."""

    url: Annotated[str, AfterValidator(_check_http_url)] = Field(description="the API's address")
    model: str = Field(description="its name there")
    api_key: str | None = Field(None, repr=False, description="sent to it")
    timeout: float = Field(120, gt=0, description="seconds for an answer")


class ClusterSettings(SettingsSection):
    engine: Literal["local", "ray"] = Field("local", description="ray: nodes are actors on a Ray cluster")
    address: str = Field("auto", description="of a Ray cluster")
    namespace: str = Field("polar", description="one for each server on the same Ray cluster")
    server_url: str | None = Field(None, description="how nodes reach the server [default: where it listens]")
    nodes: int | Literal["each"] = Field("each", description="gateway nodes: a number, or one on each machine")
    resources: dict[str, float] = Field({}, description="that Ray sets aside for each node")
    data: str | None = Field(
        None, description="folder of the nodes' data on each machine [default: ~/.local/state/polar]"
    )


class LogSettings(SettingsSection):
    format: Literal["text", "json"] = Field("text", description="json: a JSON object a line")
    level: Literal["debug", "info", "warning", "error"] = Field("warning", description="the least that is logged")


class TelemetrySettings(SettingsSection):
    otlp_endpoint: Annotated[str, AfterValidator(_check_http_url)] | None = Field(
        None, description="where OpenTelemetry traces go [default: nowhere]"
    )
    otlp_headers: dict[str, str] = Field({}, repr=False, description="sent with each export")


class VerifySettings(SettingsSection):
    """The automatic check of sessions before they are handed to a trainer."""

    share: float = Field(
        1.0, ge=0, le=1, description="of sessions that are checked, chosen by their ids; 0 checks none, 1 all"
    )


class Settings(SettingsSection):
    engine: EngineSettings = EngineSettings()
    gateway: GatewaySettings = GatewaySettings()
    server: ServerSettings = ServerSettings()
    store: StoreSettings = StoreSettings()
    node: NodeSettings = NodeSettings()
    cluster: ClusterSettings = ClusterSettings()
    log: LogSettings = LogSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    verify: VerifySettings = VerifySettings()
    judges: dict[str, JudgeSettings] = {}


PRIVATE_GATEWAY: dict[str, Any] = {"port": 0, "host": "127.0.0.1"}
"""The settings of a gateway of one's own: on any free port."""


def build_engine_settings_at(url: str, configured: EngineSettings) -> dict[str, Any]:
    """The engine at this address. Its kind is the configured engine's, if there is one: it takes the place of that."""
    return {"urls": [url], "kind": configured.kind if configured.urls else "vllm"}


def with_private_gateway(settings: Settings, engine_url: str | None = None) -> Settings:
    """The settings of a gateway of one's own, and with the engine at that address."""
    changes: dict[str, Any] = {"gateway": settings.gateway.model_copy(update=PRIVATE_GATEWAY)}
    if engine_url is not None:
        fields = settings.engine.model_dump() | build_engine_settings_at(engine_url, settings.engine)
        try:
            changes["engine"] = EngineSettings.model_validate(fields)
        except ValidationError as error:
            raise ConfigError(f"{format_validation_errors(error, 'engine.')}.") from error
    return settings.model_copy(update=changes)


def load(
    path: Path | None = None,
    environment: Mapping[str, str] = os.environ,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
) -> Settings:
    """Settings from `path` (default: polar.toml in this folder, if there is one), then the environment, then
    `overrides` (the command line's, by section)."""
    if path is None and Path("polar.toml").exists():
        path = Path("polar.toml")
    tables = _read_tables(path) if path is not None else {}
    sources: dict[tuple[str, ...], str] = {}  # of a setting's value, where it is not the file
    for name, value in environment.items():
        if not name.startswith(ENVIRONMENT_PREFIX):
            continue
        keys = tuple(name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__"))
        if len(keys) > 1:
            _set_nested(tables, keys, _parse_value(value))
            sources[keys] = f"the variable {name}"
        else:
            _warn_if_misspelt(name)
    for section, values in (overrides or {}).items():
        for key, value in values.items():
            _set_nested(tables, (section, key), value)
            sources[section, key] = "the command line"
    _set_default_engine(tables)
    try:
        return Settings.model_validate(tables)
    except ValidationError as error:
        problem = error.errors()[0]
        where = tuple(str(step) for step in problem["loc"])
        # A section that does not exist is reported without the key that somebody set in it.
        found = [(keys, source) for keys, source in sources.items() if all(map(eq, where, keys))]
        # What is wrong may be a default, beside something else: then it has no source of its own.
        keys, source = found[0] if found else (where, str(path or "the settings"))
        message = _MESSAGES.get(problem["type"], problem["msg"].removeprefix("Value error, ")) + "."
        if problem["type"] == "extra_forbidden" and (nearest := _find_nearest_setting(max(keys, where, key=len))):
            is_variable = source.startswith("the variable ")
            message += f" Did you mean {_to_variable(nearest) if is_variable else '.'.join(nearest)}?"
        raise ConfigError(f"{source}: {'.'.join(where)}: {message}") from error


_MISSPELT_VARIABLE_RATIO = 0.9
"""Of difflib: POLAR_GATEWAY_PORT and POLAR_GATWAY_PORT are misspelt settings, POLAR_NODE_TOKEN is another variable."""


@cache
def _warn_if_misspelt(variable: str) -> None:
    """Names a variable that looks like a setting and is none, once. Others with our prefix are none of our business."""
    by_words = {_to_variable(keys).replace("__", "_"): keys for keys in _list_settings(Settings)}
    for words in difflib.get_close_matches(variable, by_words, n=1, cutoff=_MISSPELT_VARIABLE_RATIO):
        meant = _to_variable(by_words[words])
        log.warning("The variable %s is no setting and has no effect: did you mean %s?", variable, meant)


def _find_nearest_setting(keys: tuple[str, ...]) -> tuple[str, ...] | None:
    """The setting, or the section, whose name looks most like this one; None where none does."""
    names = {".".join(known[:depth]): known[:depth] for known in _list_settings(Settings) for depth in (1, len(known))}
    nearest = difflib.get_close_matches(".".join(keys), names, n=1, cutoff=0.7)
    return names[nearest[0]] if nearest else None


def _list_settings(section: type[SettingsSection]) -> Iterator[tuple[str, ...]]:
    """The path of every setting that has a name of its own. What is in lists and tables has none."""
    for name, field in section.model_fields.items():
        kinds = get_args(field.annotation) if isinstance(field.annotation, UnionType) else (field.annotation,)
        inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, SettingsSection)]
        if inner:
            yield from ((name, *keys) for keys in _list_settings(inner[0]))
        else:
            yield (name,)


def _to_variable(keys: tuple[str, ...]) -> str:
    return ENVIRONMENT_PREFIX + "__".join(keys).upper()


def _set_default_engine(tables: dict[str, Any]) -> None:
    """Where nothing is said of engines it is the one that brings a model along. An empty list says that there are none
    yet."""
    engine = tables.setdefault("engine", {})
    if isinstance(engine, dict) and not engine.get("urls"):
        engine.setdefault("kind", "vllm" if "urls" in engine else "embedded")


_MESSAGES = {"extra_forbidden": "there is no such setting", "model_type": "this is a table of settings"}


def _read_tables(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"Can't read {path}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.") from error


def _set_nested(tables: dict[str, Any], keys: tuple[str, ...], value: Any) -> None:
    for key in keys[:-1]:
        inner = tables.get(key)
        if not isinstance(inner, dict):
            inner = tables[key] = {}
        tables = inner
    tables[keys[-1]] = value


def _parse_value(value: str) -> Any:
    """Lists and tables are JSON; what other strings mean follows from the setting's type."""
    if not value.lstrip().startswith(("[", "{")):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value
