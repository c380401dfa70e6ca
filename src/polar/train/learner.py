"""The optimiser's side of training: a batch goes in, and the weights have changed."""

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
    """`tree_model.TreeModel`, or what stands in for it."""

    def compute_logprobs(self, packed: PackedTrees) -> Tensor: ...

    def backward(self, packed: PackedTrees, loss: LossFunction) -> Tensor: ...

    def reduce_memory(self, packed: PackedTrees, *, training: bool) -> str | None: ...


class LearnerStats(Struct):
    """A step in numbers. Ratios are those of the trainer's own probability, before its first update, to the
    engine's: away from 1 by updates that came in between, and by what engine and trainer compute differently."""

    loss: float
    grad_norm: float  # pre-clip norm, averaged over the step's updates
    learning_rate: float
    updates: int
    computed_tokens: int  # that went through the model, forwards and backwards
    trained_tokens: int
    kl_behaviour: float  # of what sampled from the trainer's own
    ratio_mean: float
    ratio_max: float
    truncated: float  # share of tokens whose importance weight was cut
    clipped: float  # share of tokens whose ratio was, over all updates
    memory_retries: int = 0  # how often memory ran out, and something was computed again
    kl_initial: float | None = None
    logprobs: Any = field(default=None)  # of each entry of the batch, before the first update
    seconds: dict[str, float] = field(default_factory=dict)


class Learner:
    """Not to be used by two threads at a time."""

    def __init__(self, folder: Path, settings: TrainSettings) -> None:
        enable_expandable_segments()
        if settings.model.threads is not None:
            torch.set_num_threads(settings.model.threads)
        torch.manual_seed(settings.seed)
        self._settings = settings
        self.model = load_model(folder, settings.model)
        self.tree_unsupported_reason: str | None = None  # why the model can't run over trees, where it can't
        self._initial_packed_model: PackedModel | None = None
        if settings.grpo.kl and settings.model.lora is None:  # first: what is kept of activations is what is left then
            self._initial_packed_model = self._build_packed_model(load_frozen_copy(folder, settings.model))
        self._packed_model = self._build_packed_model(self.model)
        self.vocab_size: int = self.model.get_input_embeddings().num_embeddings
        self._parameters = get_trainable_parameters(self.model)
        self._optimizer = self._build_optimizer()
        self._updates = 0
        self._retries = OutOfMemoryRetrier(self.model.device)

    def _build_packed_model(self, model: Any) -> PackedModel:
        """Models that can't run over trees read one sequence at a time."""
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
        """With its state, which AdamW would make in its first step: whether there is memory for it shows at the start.
        On a GPU a step is one kernel, which takes none."""
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
            for one in self._parameters.values():
                optimizer.state[one] = {
                    "step": torch.zeros((), device=one.device if fused else None),
                    "exp_avg": torch.zeros_like(one),
                    "exp_avg_sq": torch.zeros_like(one),
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
        """Epochs over the groups, in minibatches of them: `number` is the step's, for the order."""
        settings = self._settings
        whole = Batch.from_groups(groups, settings.grpo.normalise)
        parts = [self._split_minibatches(groups, number, epoch) for epoch in range(settings.optimizer.epochs)]
        updates = [some for epoch in parts for some in epoch]
        once = len(updates) == 1
        began, retries = time.perf_counter(), self._retries.count
        old = None if once else self.compute_logprobs(whole.packed)
        initial = self._compute_initial_logprobs(whole) if settings.grpo.kl else None
        scored = time.perf_counter()
        stats = LearnerStats(0.0, 0.0, 0.0, 0, 0 if once else len(whole.packed), len(whole), 0.0, 1.0, 1.0, 0.0, 0.0)
        places = np.cumsum([0, *(len(group) for group in groups)])
        norms, clipped = [], []
        for some in updates:
            entries = np.concatenate([np.arange(places[one], places[one + 1]) for one in some])
            index = torch.from_numpy(entries).to(self.model.device)
            batch = whole if once else Batch.from_groups([groups[one] for one in some], settings.grpo.normalise)
            then = None if old is None else old[index], None if initial is None else initial[index]
            update, logprobs = self._compute_gradient(f"Step {number}", batch, *then)
            norms.append(self._apply_update(number))
            stats.loss += update.total / len(updates)
            stats.computed_tokens += len(batch.packed)
            clipped.append(update.clipped_tokens / max(1, len(batch)))
            if old is None:
                old = logprobs
        assert old is not None
        stats.updates, stats.learning_rate = len(norms), self._optimizer.param_groups[0]["lr"]
        stats.grad_norm, stats.clipped = float(np.mean(norms)), float(np.mean(clipped))
        stats.logprobs = old.double().cpu().numpy()
        stats.memory_retries = self._retries.count - retries
        if initial is not None:
            stats.kl_initial = float((grpo.estimate_kl(old, initial)).mean())
        _add_ratio_stats(stats, whole.columns, settings.grpo.tis_cap)
        stats.seconds = {"score": scored - began, "learn": time.perf_counter() - scored}
        return stats

    def _compute_gradient(
        self, what: str, batch: Batch, old: Tensor | None, initial: Tensor | None
    ) -> tuple["UpdateLoss", Tensor]:
        """Of an update, which is not made yet; and the log-probabilities before it."""

        def compute() -> tuple[UpdateLoss, Tensor]:
            update = UpdateLoss(batch, self._settings.grpo, self.model.device, old, initial)
            return update, self._packed_model.backward(batch.packed, update.compute_loss)

        return self._run_within_memory(what, self._packed_model, batch.packed, compute, training=True)

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
        """The one setting that makes the most room."""
        settings = self._settings.model
        if settings.lora is None and settings.trainable_layers is None:
            size = sum(it.numel() * it.element_size() for it in self._parameters.values())
            return f"Set model.lora = {{}}: gradients and optimizer take {3 * size / 1e9:.1f} GB without it."
        if settings.dtype == "float32":
            return 'Set model.dtype = "bfloat16".'
        return "Give tasks a smaller budget of tokens: the longest session decides."

    def _split_minibatches(self, groups: Sequence[TrainingGroup], number: int, epoch: int) -> list[list[int]]:
        """Which groups go into each update."""
        settings = self._settings.optimizer
        if settings.update_tokens is None and settings.minibatches == 1:
            return [list(range(len(groups)))]
        order = np.random.default_rng([self._settings.seed, number, epoch]).permutation(len(groups))
        if settings.update_tokens is None:
            return [sorted(some.tolist()) for some in np.array_split(order, settings.minibatches) if len(some)]
        found: list[list[int]] = []
        left = 0
        for one in order.tolist():
            tokens = sum(len(tree.ids) for tree in groups[one].trees)
            if tokens > left:
                found.append([])
                left = settings.update_tokens
            found[-1].append(one)
            left -= tokens
        return [sorted(some) for some in found]

    def _apply_update(self, number: int) -> float:
        """Changes the weights; the gradient's length."""
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

    # What others need of the model

    def score(self, prompt: Sequence[int], sampled: Sequence[int]) -> list[float]:
        """Log-probabilities of sampled tokens behind a prompt, at temperature 1."""
        ids = np.array([*prompt, *sampled], np.int32)
        places = np.arange(len(prompt), len(ids), dtype=np.int64)
        one = pack_trees([make_path_tree(ids, places, np.ones(len(places), np.float32))])
        scored: list[float] = self.compute_logprobs(one).tolist()
        return scored

    def compute_logprobs(self, packed: PackedTrees) -> Tensor:
        return self._run_model(self._packed_model, packed)

    def _run_model(self, packed_model: PackedModel, packed: PackedTrees) -> Tensor:
        what = f"A batch of {len(packed)} tokens, whose log-probabilities are computed,"
        return self._run_within_memory(
            what, packed_model, packed, lambda: packed_model.compute_logprobs(packed), training=False
        )

    # What a checkpoint holds

    def get_trained_weights(self) -> dict[str, Tensor]:
        """What is trained."""
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    def state_dict(self) -> dict[str, Any]:
        """What else decides about the next step."""
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
            group["fused"] = own["fused"]  # of this device; older checkpoints say nothing of it
        self._optimizer.state.clear()  # or there would be two for a moment
        self._optimizer.load_state_dict(saved)
        self._updates = state["updates"]
        torch.set_rng_state(state["random"])
        if state["random_cuda"] and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state["random_cuda"])


class UpdateLoss:
    """The loss of one update, some tokens at a time."""

    def __init__(
        self, batch: Batch, settings: GrpoSettings, device: torch.device, old: Tensor | None, initial: Tensor | None
    ) -> None:
        """Without `old` the update is the batch's only one, and what it is before the update is `old`."""
        self._settings = settings
        self._old_logprobs, self._initial_logprobs = old, initial
        self._behavior_logprobs = torch.from_numpy(batch.columns.behavior_logprobs).to(device)
        self._weight = torch.from_numpy(batch.weight).to(device)
        self._coefficient = torch.from_numpy(batch.advantage * batch.weight).to(device)
        self.total = 0.0
        self.clipped_tokens = 0

    def compute_loss(self, index: Tensor, logprobs: Tensor) -> Tensor:
        settings = self._settings
        old = logprobs.detach() if self._old_logprobs is None else self._old_logprobs[index]
        behavior_logprobs = self._behavior_logprobs[index]
        behavior_logprobs = torch.where(behavior_logprobs.isnan(), old, behavior_logprobs)
        loss = grpo.compute_policy_loss(
            logprobs,
            old,
            grpo.compute_importance_weights(old, behavior_logprobs, settings.tis_cap),
            self._coefficient[index],
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
        )
        if self._initial_logprobs is not None:
            loss = (
                loss
                + settings.kl * (self._weight[index] * grpo.estimate_kl(logprobs, self._initial_logprobs[index])).sum()
            )
        ratio = torch.exp(logprobs.detach() - old)
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
    """The mean ratio of some tokens; None where there are none."""
    chosen = mask & ~np.isnan(columns.behavior_logprobs)
    if not chosen.any():
        return None
    return float(np.exp(logprobs[chosen] - columns.behavior_logprobs[chosen]).mean())
