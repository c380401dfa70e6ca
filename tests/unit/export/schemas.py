"""The trainers' own classes, field for field, for where their packages are not at hand: read from their sources. A
field that is not theirs is refused, except where the trainer takes any."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

Bit = Annotated[int, Meta(ge=0, le=1)]
Id = Annotated[int, Meta(ge=0)]
Logprob = Annotated[float, Meta(le=0)]


class Facts(Struct, forbid_unknown_fields=True):
    """Ours, wherever a format has room for it."""

    session_id: str
    task_id: str
    trace: int
    traces: int
    reward: float | None
    reason: str | None
    suspicious: bool
    turn_rewards: dict[str, float]
    weight: Annotated[float, Meta(gt=0, le=1)]
    role: str
    agent_id: str | None
    exchange_ids: list[str]
    spans: list[tuple[int, int]]
    prompt_length: int
    policy_versions: list[int]
    temperature: float | None
    finish_reason: str | None
    branch_reason: str | None


class SlimeSample(Struct, forbid_unknown_fields=True):
    """slime/utils/types.py: Sample."""

    group_index: int
    index: int
    rollout_id: int
    session_id: str
    prompt: str
    tokens: list[Id]
    response: str
    response_length: int
    loss_mask: list[Bit]
    rollout_log_probs: list[Logprob] | None
    weight_versions: list[str]
    reward: float | None
    status: Literal["pending", "completed", "truncated", "aborted", "failed"]
    remove_sample: bool
    metadata: Facts


class VerlFacts(Facts, forbid_unknown_fields=True):
    """With what verl reads of `extra_fields`: verl/trainer/ppo/v1/agent_loop_tq.py."""

    min_global_steps: int | None
    max_global_steps: int | None
    reward_extra_info: dict[str, float]


class AgentLoopOutput(Struct, forbid_unknown_fields=True):
    """verl/experimental/agent_loop/agent_loop.py."""

    prompt_ids: list[Id]
    response_ids: list[Id]
    response_mask: list[Bit]
    response_logprobs: list[Logprob] | None
    reward_score: float | None
    num_turns: Annotated[int, Meta(ge=2)]
    metrics: dict[str, float]
    extra_fields: VerlFacts


class TrlRow(Facts, forbid_unknown_fields=True, kw_only=True):
    """One place in each list of what a rollout_func returns."""

    prompt_ids: list[Id]
    completion_ids: list[Id]
    logprobs: list[Logprob] | None
    env_mask: list[Bit]


class TrajectoryID(Struct, forbid_unknown_fields=True):
    instance_id: str
    repetition_id: int


class GeneratorOutput(Struct, forbid_unknown_fields=True):
    """skyrl/train/generators/base.py."""

    prompt_token_ids: list[list[Id]]
    response_ids: list[list[Id]]
    rewards: list[float]
    loss_masks: list[list[Bit]]
    rollout_logprobs: list[list[Logprob]] | None
    stop_reasons: list[str]
    trajectory_ids: list[TrajectoryID]
    is_last_step: list[bool]
    rollout_metrics: None
    env_metrics: list[Facts]


class Trained(Struct, kw_only=True):
    """nemo_gym/openai_utils.py: what an item carries for training, or none of it."""

    prompt_token_ids: list[Id] | None = None
    generation_token_ids: list[Id] | None = None
    generation_log_probs: list[Logprob] | None = None


class OutputText(Struct, forbid_unknown_fields=True):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]


class OutputMessage(Trained, tag_field="type", tag="message", forbid_unknown_fields=True, kw_only=True):
    id: str
    role: Literal["assistant"]
    status: Literal["completed"]
    content: list[OutputText]


class FunctionCall(Trained, tag_field="type", tag="function_call", forbid_unknown_fields=True, kw_only=True):
    id: str
    call_id: str
    name: str
    arguments: str
    status: Literal["completed"]


class ReasoningItem(Trained, tag_field="type", tag="reasoning", forbid_unknown_fields=True, kw_only=True):
    id: str
    summary: list[dict[str, str]]


class Response(Struct, forbid_unknown_fields=True):
    id: str
    object: Literal["response"]
    created_at: float
    model: str
    status: Literal["completed", "incomplete"]
    output: list[OutputMessage | FunctionCall | ReasoningItem]
    parallel_tool_calls: bool
    tool_choice: str
    tools: list[Any]


class VerifyResponse(Struct, forbid_unknown_fields=True):
    responses_create_params: dict[str, Any]
    response: Response
    reward: float
    polar: Facts


class TrainingSample(Struct, array_like=True, forbid_unknown_fields=True):
    """prime_rl/transport/types.py; what stands under `None` is what we never fill in."""

    token_ids: list[Id]
    mask: list[bool]
    logprobs: list[Logprob]
    temperatures: list[float]
    env_name: str
    ref_logprobs: None = None
    mm_refs: None = None
    routed_experts: None = None
    mm_token_type_ids: None = None
    rl_weights: None = None
    ce_weights: None = None
    ref_kl_weights: None = None
    advantages: list[float] | None = None
    sampling_mask: None = None
    trace_id: str | None = None
    branch_index: int | None = None

    def __post_init__(self) -> None:
        arrays = (self.mask, self.logprobs, self.temperatures, self.advantages or self.mask)
        if any(len(array) != len(self.token_ids) for array in arrays):
            raise ValueError("arrays of different length")


class ExecutorResult(Struct, forbid_unknown_fields=True):
    """openrlhf/utils/agent.py: what `execute` returns."""

    prompt: str
    label: None
    images: None
    mm_train_inputs: None
    reward: float | None
    scores: float | None
    observation_tokens: list[Id]
    action_ranges: list[tuple[int, int]]
    rollout_log_probs: list[Logprob] | None
    truncated: bool
    extra_logs: dict[str, float]
    polar: Facts


One = Annotated[list[Any], Meta(min_length=1, max_length=1)]


class ArealTensors(Struct, forbid_unknown_fields=True):
    input_ids: One
    loss_mask: One
    logprobs: One
    versions: One
    attention_mask: One
    rewards: One
    polar: Facts


class TensorData(Struct, forbid_unknown_fields=True):
    """tinker/types."""

    data: list[float]
    dtype: Literal["int64", "float32"]
    shape: list[int]


class EncodedText(Struct, forbid_unknown_fields=True, tag_field="type", tag="encoded_text"):
    tokens: list[Id]


class ModelInput(Struct, forbid_unknown_fields=True):
    chunks: list[EncodedText]


class LossInputs(Struct, forbid_unknown_fields=True):
    target_tokens: TensorData
    logprobs: TensorData
    advantages: TensorData | None = None


class Datum(Struct, forbid_unknown_fields=True):
    model_input: ModelInput
    loss_fn_inputs: LossInputs
    polar: Facts


class TokenHistory(Struct, forbid_unknown_fields=True):
    """art/trajectories: CompletionsTokenHistory."""

    model: str
    prompt: list[Id]
    prompt_sources: list[Any]
    sampled_spans: list[tuple[int, int]]


class TensorizedHistory(Struct, forbid_unknown_fields=True):
    """art/trajectories/tensors: sampled tokens are exact too, and all arrays are as long."""

    history: TokenHistory
    model: str
    tokens: list[Id]
    logprobs: list[Logprob | Literal["NaN"]]
    flags: list[int]
    polar: Facts

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.logprobs) == len(self.flags):
            raise ValueError("arrays of different length")
        if any(flag & 2 and not flag & 1 for flag in self.flags):
            raise ValueError("sampled, and not exact")


class TraceRow(Struct, forbid_unknown_fields=True):
    """The contract's trace."""

    prompt_ids: list[Id]
    response_ids: list[Id]
    loss_mask: list[Bit]
    response_logprobs: list[Logprob] | None
    prompt_messages: list[Any]
    response_messages: list[Any]
    tools: list[Any] | None
    finish_reason: str | None
    reward: float | None
    reason: str | None
    weight: float
    policy_versions: list[int]
    exchange_ids: list[str]
    role: str
    agent_id: str | None
    branch_reason: str | None
    temperature: float | None
    metadata: dict[str, Any]


class TrajectoryRow(Struct, forbid_unknown_fields=True):
    status: str
    traces: list[TraceRow]
    metadata: dict[str, Any]
    error: str | None


class SessionTiming(Struct, forbid_unknown_fields=True):
    register_to_init_queue_ms: float
    init_ms: float
    run_ms: float
    postrun_ms: float


class SessionResult(Struct, forbid_unknown_fields=True):
    session_id: str
    task_id: str
    status: Literal["COMPLETED", "ERROR", "TIMEOUT"]
    trajectory: TrajectoryRow
    timing: SessionTiming
    node_id: str | None
    error: str | None
    metadata: dict[str, Any]
    reward: float | None = None  # ours, besides
    reason: str | None = None
    evidence: list[dict[str, Any]] = []


SCHEMAS: dict[str, type] = {
    "polar": SessionResult,
    "slime": SlimeSample,
    "verl": AgentLoopOutput,
    "trl": TrlRow,
    "skyrl": GeneratorOutput,
    "nemo-gym": VerifyResponse,
    "prime-rl": TrainingSample,
    "openrlhf": ExecutorResult,
    "areal": ArealTensors,
    "tinker": Datum,
    "art": TensorizedHistory,
}


def check(name: str, data: bytes) -> None:
    for line in data.splitlines():
        msgspec.json.decode(line, type=SCHEMAS[name])
