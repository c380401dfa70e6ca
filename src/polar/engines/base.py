"""An engine: where tokens are sampled.

An engine is one replica of an inference server. It takes a canonical request and yields what was sampled as it is
sampled: the events that a harness may see, and beside them the token ids and log-probabilities that the trainer needs.
"""

from collections.abc import AsyncGenerator
from typing import Any, Literal, Protocol

from msgspec import Struct, field

from polar.records.exchange import LogprobKind, TokenIds, VersionSpan
from polar.types import FinishReason, ReplyEvent, Request, SamplingParams, TokenLogprob, Usage

EngineState = Literal["running", "frozen", "asleep"]


def normalize_engine_url(url: str) -> str:
    """An engine's address, as it is told apart from others: people write it with and without the API's own path."""
    return url.rstrip("/").removesuffix("/v1")


class Chunk(Struct, gc=False):
    """One step of a generation, as the engine reported it. Fields are empty where this step says nothing of them."""

    events: list[ReplyEvent] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] | None = None  # one per id
    prompt_ids: TokenIds | None = None
    prompt_json: bytes | None = None  # the same as a JSON list, where that is how the engine gave them
    versions: list[VersionSpan] | None = None  # as the engine labels them, over the whole reply
    routed_experts: bytes | None = None
    reasoning_tokens: int | None = None  # how many of the ids are reasoning, where somebody counted
    alternatives: list[TokenLogprob] | None = None  # for a harness that asked for log-probabilities itself
    finish_reason: FinishReason | None = None
    stop_sequence: str | None = None
    usage: Usage | None = None


class TokenPrompt(Struct, frozen=True):
    """A prompt as token ids, and the same as JSON (a list without its brackets): the longest part of what is sent, and
    mostly known from the call before."""

    ids: TokenIds
    json: bytes


class Capabilities(Struct):
    """What an engine can do, as found by a probe (`polar doctor`) or known of its kind."""

    logprobs: LogprobKind = "none"
    accepts_token_ids: bool = False  # prompts of token ids, and ids back
    reports_weight_version: bool = (
        False  # whatever it says of versions is true of its weights, whoever told it otherwise
    )
    context_length: int | None = None
    models: list[str] = field(default_factory=list)


class Engine(Protocol):
    """One replica. Raises EngineError; everything else it raises is a bug."""

    url: str
    capabilities: Capabilities

    async def start(self) -> Capabilities:
        """Connects and finds out what there is."""
        ...

    def generate(
        self, request: Request, *, stream: bool, prompt: TokenPrompt | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """Samples one reply. Closing the generator early aborts the sampling.

        With a `prompt` the engine conditions on exactly these ids, whatever the request's messages are, and its chunks
        have ids and no events. Only for engines that take ids."""
        ...

    def find_tokenizer_folder(self) -> str | None:
        """The folder of the model's tokenizer and chat template, where one is known."""
        ...

    def apply_sampling_defaults(self, sampling: SamplingParams) -> SamplingParams:
        """Sampling as it will be used: what the harness left open is filled in."""
        ...

    async def count_tokens(self, request: Request) -> int:
        """The prompt's length, without sampling."""
        ...

    async def tokenize(self, text: str) -> list[int] | None:
        """The ids of a text, without those that a prompt begins or ends with; None where the engine doesn't tell."""
        ...

    async def reports_version_spans(self) -> bool:
        """Whether the engine itself says which weights sampled which tokens."""
        ...

    async def count_running_calls(self) -> int | None:
        """How many calls are being sampled right now; None where the engine doesn't tell."""
        ...

    @property
    def connections_opened(self) -> int:
        """Made to the server so far."""
        ...

    async def get_process_start_time(self) -> float | None:
        """When the server's process was started; None where the engine doesn't tell."""
        ...

    async def get_state(self) -> EngineState | None:
        """How it stands, whoever told it to; None where the engine doesn't tell."""
        ...

    async def freeze(self) -> bool:
        """Stops sampling where it stands, running calls included; False where the engine can't."""
        ...

    async def thaw(self) -> None: ...

    async def sleep(self) -> bool:
        """Gives the accelerator's memory back, cache and all, until it is woken; False where the engine can't. Only
        while nothing runs."""
        ...

    async def wake(self) -> None: ...

    async def close(self) -> None: ...


class LaunchedEngine(Protocol):
    """A server that an engine's kind brought up by itself, because none was configured. A kind that can has an
    `async def launch(settings) -> Launched`."""

    url: str
    version: int  # of the weights that it began with

    async def stop(self) -> None: ...


# How engines should be: the replicas of each run, the policy that they hold, and whether they stand still. Whoever has
# engines makes it so (EngineFleet.apply).

PauseState = Literal["freeze", "hold", "drain", "sleep", "settle"]
"""settle: frozen calls hear of new weights before any engine goes on."""


class DesiredReplica(Struct, frozen=True):
    url: str
    version: int = 0


class RunEngine(Struct, frozen=True):
    """What the engines of a run are. None is as `[engine]` says; of another kind or model, as the engine says."""

    kind: str | None = None
    model: str | None = None
    tokenizer: str | None = None  # folder or name
    template_kwargs: dict[str, Any] | None = None


class DesiredPool(Struct, frozen=True):
    replicas: list[DesiredReplica] = []
    paused: PauseState | None = None
    since: int = 0  # the generation in which calls were frozen last: who froze them earlier has missed a thaw
    engine: RunEngine = RunEngine()

    @property
    def replica_urls(self) -> list[str]:
        return [replica.url for replica in self.replicas]


class DesiredEngines(Struct, frozen=True):
    """The engines of every run that has some of its own; the others use those of "default"."""

    generation: int = 0  # grows with every change
    pools: dict[str, DesiredPool] = {}
    server: str = ""  # whose document it is: another one's numbers can't be compared with its
