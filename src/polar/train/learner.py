"""The optimizer's side of training: takes a batch and updates the weights."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from msgspec import Struct, field
from torch import Tensor

from polar.errors import ConfigError, PolarError
from polar.torch_runtime import is_out_of_memory
from polar.train import grpo
from polar.train.batch import Batch, TrainingGroup
from polar.train.groups import TokenColumns
from polar.train.memory import OutOfMemoryError, OutOfMemoryRetrier, enable_expandable_segments
from polar.train.model import get_trainable_parameters, load_frozen_copy, load_model
from polar.train.packing import PackedTrees, make_path_tree, pack_trees
from polar.train.settings import GrpoSettings, TrainSettings
from polar.train.tree_model import LossFunction, SequentialModel, TreeModel

T = TypeVar("T")


class PackedModel(Protocol):
    """A model that computes log-probabilities and gradients over packed trees: `TreeModel` or `SequentialModel`."""

    def compute_logprobs(self, packed: PackedTrees) -> Tensor: ...

    def backward(self, packed: PackedTrees, loss: LossFunction) -> Tensor: ...

    def reduce_memory(self, packed: PackedTrees, *, training: bool) -> str | None: ...


class LearnerStats(Struct):
    """Statistics of a step. A ratio is the trainer's probability of a token before the step's first update, divided by
    the engine's. It differs from 1 by the updates in between and by the numerical differences of the two."""

    loss: float
    grad_norm: float  # pre-clip norm, averaged over the step's updates
    learning_rate: float
    updates: int
    computed_tokens: int  # forward and backward
    trained_tokens: int
    kl_behaviour: float  # of the sampling policy from the trainer's
    ratio_mean: float
    ratio_max: float
    truncated: float  # share of tokens with a truncated importance weight
    clipped: float  # share of tokens with a clipped ratio, averaged over updates
    memory_retries: int = 0  # computations repeated after running out of memory
    kl_initial: float | None = None
    logprobs: Any = field(default=None)  # of each batch entry, before the first update
    seconds: dict[str, float] = field(default_factory=dict)


class Learner:
    """Holds the model and its optimizer. Not thread-safe."""

    def __init__(self, folder: Path, settings: TrainSettings) -> None:
        enable_expandable_segments()
        if settings.model.threads is not None:
            torch.set_num_threads(settings.model.threads)
        torch.manual_seed(settings.seed)
        self._settings = settings
        self.model = load_model(folder, settings.model)
        self.tree_unsupported_reason: str | None = None  # set if the model can't run over trees
        self._initial_packed_model: PackedModel | None = None
        if (
            settings.grpo.kl and settings.model.lora is None
            # Loaded first, so that its memory does not count as free for activations.
        ):
            self._initial_packed_model = self._build_packed_model(load_frozen_copy(folder, settings.model))
        self._packed_model = self._build_packed_model(self.model)
        self.vocab_size: int = self.model.get_input_embeddings().num_embeddings
        self._parameters = get_trainable_parameters(self.model)
        self._optimizer = self._build_optimizer()
        self._updates = 0
        self._retries = OutOfMemoryRetrier(self.model.device)

    def _build_packed_model(self, model: Any) -> PackedModel:
        """A TreeModel, or a SequentialModel for models that can't run over trees."""
        optimizer = self._settings.optimizer
        try:
            return TreeModel(
                model,
                chunk_tokens=optimizer.chunk_tokens,
                kept_tokens=optimizer.kept_tokens,
                compiled=self._settings.model.compiled,
            )
        except ConfigError as error:
            self.tree_unsupported_reason = str(error)
            return SequentialModel(model)

    def _build_optimizer(self) -> torch.optim.AdamW:
        """Allocates the optimizer's state at once, which AdamW would do in its first step, so that a lack of memory
        shows at the start. On a GPU the fused step needs no further memory."""
        settings = self._settings.optimizer
        fused = True if self.model.device.type == "cuda" else None
        optimizer = torch.optim.AdamW(
            self._parameters.values(),
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=fused,
        )
        try:
            for parameter in self._parameters.values():
                optimizer.state[parameter] = {
                    "step": torch.zeros((), device=parameter.device if fused else None),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemoryError(
                f"The optimizer's state does not fit into memory. {self._suggest_memory_setting()}"
            ) from error
        return optimizer

    # A step

    def step(self, groups: Sequence[TrainingGroup], number: int) -> LearnerStats:
        """Trains epochs of minibatches over the groups. `number` is the step's; it seeds the order of the groups."""
        settings = self._settings
        batch_of_step = Batch.from_groups(groups, settings.grpo.normalise)
        epochs = [self._split_minibatches(groups, number, epoch) for epoch in range(settings.optimizer.epochs)]
        updates = [group_indices for epoch in epochs for group_indices in epoch]
        is_single_update = len(updates) == 1
        started_at, retries = time.perf_counter(), self._retries.count
        old_logprobs = None if is_single_update else self.compute_logprobs(batch_of_step.packed)
        initial_logprobs = self._compute_initial_logprobs(batch_of_step) if settings.grpo.kl else None
        scored_at = time.perf_counter()
        stats = LearnerStats(
            0.0,
            0.0,
            0.0,
            0,
            0 if is_single_update else len(batch_of_step.packed),
            len(batch_of_step),
            0.0,
            1.0,
            1.0,
            0.0,
            0.0,
        )
        offsets = np.cumsum([0, *(len(group) for group in groups)])
        norms, clipped = [], []
        for group_indices in updates:
            entries = np.concatenate([np.arange(offsets[place], offsets[place + 1]) for place in group_indices])
            index = torch.from_numpy(entries).to(self.model.device)
            batch = (
                batch_of_step
                if is_single_update
                else Batch.from_groups([groups[place] for place in group_indices], settings.grpo.normalise)
            )
            reference_logprobs = (
                None if old_logprobs is None else old_logprobs[index],
                None if initial_logprobs is None else initial_logprobs[index],
            )
            update, logprobs = self._compute_gradient(f"Step {number}", batch, *reference_logprobs)
            norms.append(self._apply_update(number))
            stats.loss += update.total / len(updates)
            stats.computed_tokens += len(batch.packed)
            clipped.append(update.clipped_tokens / max(1, len(batch)))
            if old_logprobs is None:
                old_logprobs = logprobs
        assert old_logprobs is not None
        stats.updates, stats.learning_rate = len(norms), self._optimizer.param_groups[0]["lr"]
        stats.grad_norm, stats.clipped = float(np.mean(norms)), float(np.mean(clipped))
        stats.logprobs = old_logprobs.double().cpu().numpy()
        stats.memory_retries = self._retries.count - retries
        if initial_logprobs is not None:
            stats.kl_initial = float((grpo.estimate_kl(old_logprobs, initial_logprobs)).mean())
        _add_ratio_stats(stats, batch_of_step.columns, settings.grpo.tis_cap)
        stats.seconds = {"score": scored_at - started_at, "learn": time.perf_counter() - scored_at}
        return stats

    def _compute_gradient(
        self, description: str, batch: Batch, old_logprobs: Tensor | None, initial_logprobs: Tensor | None
    ) -> tuple["UpdateLoss", Tensor]:
        """Computes the gradient of an update and the log-probabilities before it, without applying the update."""

        def compute() -> tuple[UpdateLoss, Tensor]:
            update = UpdateLoss(batch, self._settings.grpo, self.model.device, old_logprobs, initial_logprobs)
            return update, self._packed_model.backward(batch.packed, update.compute_loss)

        return self._run_within_memory(description, self._packed_model, batch.packed, compute, training=True)

    def _run_within_memory(
        self,
        description: str,
        packed_model: PackedModel,
        packed: PackedTrees,
        compute: Callable[[], T],
        *,
        training: bool,
    ) -> T:
        return self._retries.run(
            description,
            compute,
            discard=lambda: self._optimizer.zero_grad(set_to_none=True),
            reduce_memory=lambda: packed_model.reduce_memory(packed, training=training),
            advice=self._suggest_memory_setting,
        )

    def _suggest_memory_setting(self) -> str:
        """Names the setting that frees the most memory."""
        settings = self._settings.model
        if settings.lora is None and settings.trainable_layers is None:
            parameter_bytes = sum(
                parameter.numel() * parameter.element_size() for parameter in self._parameters.values()
            )
            return f"Set model.lora = {{}}: gradients and optimizer take {3 * parameter_bytes / 1e9:.1f} GB without it."
        if settings.dtype == "float32":
            return 'Set model.dtype = "bfloat16".'
        return "Give tasks a smaller budget of tokens: the longest session decides."

    def _split_minibatches(self, groups: Sequence[TrainingGroup], number: int, epoch: int) -> list[list[int]]:
        """The indices of the groups of each update."""
        settings = self._settings.optimizer
        if settings.update_tokens is None and settings.minibatches == 1:
            return [list(range(len(groups)))]
        order = np.random.default_rng([self._settings.seed, number, epoch]).permutation(len(groups))
        if settings.update_tokens is None:
            return [
                sorted(group_indices.tolist())
                for group_indices in np.array_split(order, settings.minibatches)
                if len(group_indices)
            ]
        minibatches: list[list[int]] = []
        remaining_tokens = 0
        for place in order.tolist():
            tokens = sum(len(tree.ids) for tree in groups[place].trees)
            if tokens > remaining_tokens:
                minibatches.append([])
                remaining_tokens = settings.update_tokens
            minibatches[-1].append(place)
            remaining_tokens -= tokens
        return [sorted(group_indices) for group_indices in minibatches]

    def _apply_update(self, number: int) -> float:
        """Updates the weights and returns the gradient's norm before clipping."""
        settings = self._settings.optimizer
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters.values(), settings.max_norm))
        if not np.isfinite(norm):
            raise PolarError(f"The gradient of step {number} is not finite: try a lower optimizer.lr, or float32.")
        for parameters in self._optimizer.param_groups:
            parameters["lr"] = self._compute_learning_rate()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._updates += 1
        return norm

    def _compute_learning_rate(self) -> float:
        settings = self._settings.optimizer
        return settings.lr * min(1.0, (self._updates + 1) / settings.warmup) if settings.warmup else settings.lr

    def _compute_initial_logprobs(self, batch: Batch) -> Tensor:
        if self._initial_packed_model is not None:
            return self._run_model(self._initial_packed_model, batch.packed)
        with self.model.disable_adapter():
            return self.compute_logprobs(batch.packed)

    # Scoring

    def score(self, prompt: Sequence[int], sampled: Sequence[int]) -> list[float]:
        """The log-probabilities of sampled tokens after a prompt, at temperature 1."""
        ids = np.array([*prompt, *sampled], np.int32)
        indices = np.arange(len(prompt), len(ids), dtype=np.int64)
        packed = pack_trees([make_path_tree(ids, indices, np.ones(len(indices), np.float32))])
        logprobs: list[float] = self.compute_logprobs(packed).tolist()
        return logprobs

    def compute_logprobs(self, packed: PackedTrees) -> Tensor:
        return self._run_model(self._packed_model, packed)

    def _run_model(self, packed_model: PackedModel, packed: PackedTrees) -> Tensor:
        description = f"A batch of {len(packed)} tokens, whose log-probabilities are computed,"
        return self._run_within_memory(
            description, packed_model, packed, lambda: packed_model.compute_logprobs(packed), training=False
        )

    # Checkpoints

    def get_trained_weights(self) -> dict[str, Tensor]:
        """The trained parameters, by name."""
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    def state_dict(self) -> dict[str, Any]:
        """The state besides the weights that determines the next step."""
        return {
            "optimizer": self._optimizer.state_dict(),
            "updates": self._updates,
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }

    def restore(self, weights: dict[str, Tensor], state: dict[str, Any]) -> None:
        if weights.keys() != self._parameters.keys():
            raise ConfigError(
                "The checkpoint is of another model, or of other trained layers: name another output folder."
            )
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(weights[name])
        saved = state["optimizer"]
        for group, own in zip(saved["param_groups"], self._optimizer.param_groups, strict=True):
            group["fused"] = own["fused"]  # depends on this device; older checkpoints lack it
        self._optimizer.state.clear()  # free it first, or there would be two at once
        self._optimizer.load_state_dict(saved)
        self._updates = state["updates"]
        torch.set_rng_state(state["random"])
        if state["random_cuda"] and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state["random_cuda"])


class UpdateLoss:
    """Computes the loss of one update in parts, and counts its clipped tokens."""

    def __init__(
        self,
        batch: Batch,
        settings: GrpoSettings,
        device: torch.device,
        old_logprobs: Tensor | None,
        initial_logprobs: Tensor | None,
    ) -> None:
        """Without `old_logprobs` the update is the step's only one, and its own log-probabilities are the old ones."""
        self._settings = settings
        self._old_logprobs, self._initial_logprobs = old_logprobs, initial_logprobs
        self._behavior_logprobs = torch.from_numpy(batch.columns.behavior_logprobs).to(device)
        self._weight = torch.from_numpy(batch.weight).to(device)
        self._coefficient = torch.from_numpy(batch.advantage * batch.weight).to(device)
        self.total = 0.0
        self.clipped_tokens = 0

    def compute_loss(self, index: Tensor, logprobs: Tensor) -> Tensor:
        settings = self._settings
        old_logprobs = logprobs.detach() if self._old_logprobs is None else self._old_logprobs[index]
        behavior_logprobs = self._behavior_logprobs[index]
        behavior_logprobs = torch.where(behavior_logprobs.isnan(), old_logprobs, behavior_logprobs)
        loss = grpo.compute_policy_loss(
            logprobs,
            old_logprobs,
            grpo.compute_importance_weights(old_logprobs, behavior_logprobs, settings.tis_cap),
            self._coefficient[index],
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
        )
        if self._initial_logprobs is not None:
            loss = (
                loss
                + settings.kl * (self._weight[index] * grpo.estimate_kl(logprobs, self._initial_logprobs[index])).sum()
            )
        ratio = torch.exp(logprobs.detach() - old_logprobs)
        self.clipped_tokens += int(((ratio < 1 - settings.clip_low) | (ratio > 1 + settings.clip_high)).sum())
        self.total += float(loss.detach())
        return loss


def _add_ratio_stats(stats: LearnerStats, columns: TokenColumns, cap: float) -> None:
    known = ~np.isnan(columns.behavior_logprobs)
    if not known.any():
        return
    difference = stats.logprobs[known] - columns.behavior_logprobs[known]
    ratio = np.exp(difference)
    stats.kl_behaviour = float(-difference.mean())
    stats.ratio_mean, stats.ratio_max = float(ratio.mean()), float(ratio.max())
    stats.truncated = float((ratio > cap).mean())


def compute_mean_ratio(columns: TokenColumns, logprobs: Any, mask: Any) -> float | None:
    """The mean ratio of the tokens in `mask`; None if there are none."""
    selected = mask & ~np.isnan(columns.behavior_logprobs)
    if not selected.any():
        return None
    return float(np.exp(logprobs[selected] - columns.behavior_logprobs[selected]).mean())
