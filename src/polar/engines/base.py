"""An engine: where tokens are sampled.

An engine is one replica of an inference server. It takes a canonical request and yields what was sampled as it is
sampled: the events that a harness may see, and beside them the token ids and log-probabilities that the trainer needs.
"""

from collections.abc import AsyncGenerator
from typing import Any, Literal, Protocol

from msgspec import Struct, field

from polar.records.exchange import LogprobKind, TokenIds, VersionSpan
from polar.records.policy import PauseState
from polar.types import FinishReason, ReplyEvent, Request, SamplingParams, TokenLogprob, Usage

EngineState = Literal["running", "frozen", "asleep"]


def normalize_engine_url(url: str) -> str:
    """Returns an engine's URL without a trailing slash or the API's path, so that one engine has one URL."""
    return url.rstrip("/").removesuffix("/v1")


class Chunk(Struct, gc=False):
    """One step of a generation, as the engine reported it. Fields that the step does not report are empty."""

    events: list[ReplyEvent] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] | None = None  # one per id
    prompt_ids: TokenIds | None = None
    prompt_json: bytes | None = None  # the same as a JSON list, where that is how the engine gave them
    versions: list[VersionSpan] | None = None  # as the engine labels them, over the whole reply
    routed_experts: bytes | None = None
    reasoning_tokens: int | None = None  # how many of the ids are reasoning, if they were counted
    alternatives: list[TokenLogprob] | None = None  # for a harness that asked for log-probabilities itself
    finish_reason: FinishReason | None = None
    stop_sequence: str | None = None
    usage: Usage | None = None


class TokenPrompt(Struct, frozen=True):
    """A prompt as token ids, and as a JSON list without its brackets: the longest part of a request to the engine, and
    mostly known from the previous call."""

    ids: TokenIds
    json: bytes


class Capabilities(Struct):
    """What an engine can do, as found by a probe (`polar doctor`) or known from its kind."""

    logprobs: LogprobKind = "none"
    accepts_token_ids: bool = False  # prompts of token ids, and ids back
    reports_weight_version: bool = False  # the version that it reports is always that of its weights
    context_length: int | None = None
    models: list[str] = field(default_factory=list)


class Engine(Protocol):
    """One replica. Raises EngineError; any other exception is a bug."""

    url: str
    capabilities: Capabilities

    async def start(self) -> Capabilities:
        """Connects, and returns what the engine can do."""
        ...

    def generate(
        self, request: Request, *, stream: bool, prompt: TokenPrompt | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """Samples one reply. Closing the generator early aborts the sampling.

        With a `prompt` the engine conditions on exactly these ids, whatever the request's messages are, and its chunks
        have ids and no events. Only for engines that take ids."""
        ...

    def find_tokenizer_folder(self) -> str | None:
        """Returns the folder of the model's tokenizer and chat template, if it is known."""
        ...

    def apply_sampling_defaults(self, sampling: SamplingParams) -> SamplingParams:
        """Fills in the sampling parameters that the harness left open."""
        ...

    async def count_tokens(self, request: Request) -> int:
        """Counts the prompt's tokens without sampling."""
        ...

    async def tokenize(self, text: str) -> list[int] | None:
        """Returns the ids of a text without special tokens around it, or None if the engine can't tokenize."""
        ...

    async def reports_version_spans(self) -> bool:
        """Whether the engine reports which weights sampled which tokens."""
        ...

    async def count_running_calls(self) -> int | None:
        """Returns how many calls are being sampled right now, or None if the engine does not report it."""
        ...

    @property
    def connections_opened(self) -> int:
        """How many connections were made to the server so far."""
        ...

    async def get_process_start_time(self) -> float | None:
        """Returns when the server's process was started, or None if the engine does not report it."""
        ...

    async def get_state(self) -> EngineState | None:
        """Returns the state that this or another client has put the engine in, or None if it does not report it."""
        ...

    async def freeze(self) -> bool:
        """Stops sampling at once, in the middle of running calls. Returns False if the engine can't."""
        ...

    async def thaw(self) -> None: ...

    async def sleep(self) -> bool:
        """Frees the accelerator's memory, cache included, until `wake`. Returns False if the engine can't. Call it only
        while no call runs."""
        ...

    async def wake(self) -> None: ...

    async def close(self) -> None: ...


class LaunchedEngine(Protocol):
    """A server that an engine's kind launched because none was configured. Such a kind has an
    `async def launch(settings) -> LaunchedEngine`."""

    url: str
    version: int  # of the weights that it started with

    async def stop(self) -> None: ...


# The desired state of the engines: the replicas of each run, their policy versions, and whether generation is paused.
# EngineFleet.apply brings it about.


class DesiredReplica(Struct, frozen=True):
    url: str
    version: int = 0


class RunEngine(Struct, frozen=True):
    """The engines of a run. None stands for the value in `[engine]` or, if kind or model differ, for the engine's
    own."""

    kind: str | None = None
    model: str | None = None
    tokenizer: str | None = None  # folder or name
    template_kwargs: dict[str, Any] | None = None


class DesiredPool(Struct, frozen=True):
    replicas: list[DesiredReplica] = []
    paused: PauseState | None = None
    since: int = 0  # generation in which calls were frozen last: a fleet that froze them earlier has missed a thaw
    engine: RunEngine = RunEngine()

    @property
    def replica_urls(self) -> list[str]:
        return [replica.url for replica in self.replicas]


class DesiredEngines(Struct, frozen=True):
    """The engines of every run that has its own; the other runs use those of "default"."""

    generation: int = 0  # grows with every change
    pools: dict[str, DesiredPool] = {}
    server: str = ""  # that made the document: generations of different servers can't be compared
