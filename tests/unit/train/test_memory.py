"""What happens where memory ends: what is reckoned with, and what is computed again."""

import copy
import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from polar import torch_runtime
from polar.train import memory, packing, tree_model
from polar.train.learner import Learner, LearnerStats
from polar.train.memory import OutOfMemoryError, OutOfMemoryRetrier
from polar.train.packing import (
    Chunker,
    MemoryBudget,
    PackedTrees,
    choose_kept_activations,
    pack_trees,
    split_into_chunks,
)
from polar.train.tree_model import TreeModel
from polar.weight_sync import merged_weights
from tests.selection import leave_to_slow
from tests.unit.train import tiny
from tests.unit.train.test_learner import batch, learner
from tests.unit.train.test_tree_model import gradients, llama
from tests.unit.train.trees import group, group_tree


class Memory(TorchDispatchMode):
    """Of a device that has only so many bytes: whatever would take it beyond raises what a GPU's allocator raises."""

    def __init__(self, limit: float = float("inf")) -> None:
        super().__init__()
        self.limit = limit
        self.used = self.most = self.ended = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        before = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        for one in tree_leaves(out):
            if isinstance(one, Tensor) and one.untyped_storage()._cdata not in before | self._known:
                self._take(one.untyped_storage())
        return out

    def _take(self, storage: Any) -> None:
        size, key = storage.nbytes(), storage._cdata
        if self.used + size > self.limit:
            self.ended += 1
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes.\nMore of it.")
        self._known.add(key)
        self.used += size
        self.most = max(self.most, self.used)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.used -= size


def pack_kind(kind: str = "think_stripped") -> PackedTrees:
    return pack_trees([group_tree(group(kind))[0]])


def total(_: Tensor, logprobs: Tensor) -> Tensor:
    return logprobs.sum()


class Ending:
    """Memory ends at some moments: before a chunk goes forward, and before it goes back."""

    def __init__(self, patch: pytest.MonkeyPatch, at: set[int], error: type[RuntimeError] = torch.OutOfMemoryError):
        self.at, self.moments, self._error = at, 0, error
        for name in ("_forward", "_backward"):
            patch.setattr(TreeModel, name, self._before(getattr(TreeModel, name)))

    def _before(self, original: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            self.moments += 1
            if self.moments in self.at:
                raise self._error("CUDA out of memory. Tried to allocate 2.00 GiB.")
            original(*args)

        return call


# What is reckoned with


@pytest.mark.parametrize("kept", [0, 48, 10**6])
def test_as_much_is_needed_as_is_reckoned_with(kept: int) -> None:
    """Keys and values that wait, their gradients, copies and activations."""
    torch.manual_seed(1)
    model = llama()
    over_trees = TreeModel(model, chunk_tokens=24, kept_tokens=kept)
    need = over_trees.chunker.plan(pack_kind(), training=True).need.bytes
    with Memory() as device:
        over_trees.backward(pack_kind(), total)
    found = device.most - sum(it.numel() * it.element_size() for it in model.parameters())  # less their gradients
    assert 0.7 < found / need < 1.1


def test_what_waits_leaves_less_to_be_kept() -> None:
    """The same budget, once without what keys and values take."""
    packed = pack_kind("linear")

    def kept(**costs: float) -> int:
        budget = MemoryBudget(10**6, max_bytes=4000.0, activation_bytes=40.0, **costs)
        chunks = split_into_chunks(packed, 24, budget)
        need = choose_kept_activations(chunks, budget)
        assert need.bytes <= budget.max_bytes
        return need.kept_tokens

    assert kept() > kept(kv_bytes=10.0) > kept(kv_bytes=10.0, kv_gradient_bytes=20.0)


def test_chunks_are_shorter_where_there_is_no_room_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MIN_CHUNK_TOKENS", 4)
    budget = MemoryBudget(10**6, max_bytes=1600.0, activation_bytes=40.0, kv_bytes=4.0)
    small_chunks = split_into_chunks(pack_kind("linear"), 64, budget)
    assert 4 < max(map(len, small_chunks)) <= 32
    assert choose_kept_activations(small_chunks, budget).bytes <= budget.max_bytes


# What ran out of memory


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.folder(tmp_path, vocab_size=16)


def changed(one: Learner, step: int = 1) -> tuple[LearnerStats, dict[str, Tensor]]:
    told = one.step(batch(), step)
    state = one._optimizer.state_dict()["state"]
    moments = {f"{number} {name}": value for number, values in state.items() for name, value in values.items()}
    return told, {name: value.clone() for name, value in (one.get_trained_weights() | moments).items()}


@pytest.mark.parametrize("tries", leave_to_slow([2, 6], but=[2]))
@pytest.mark.parametrize(
    "changes",
    [{}, {"epochs": 2, "minibatches": 2}],
    ids=["one update", "several, with scores before"],
)
def test_nothing_is_lost_wherever_memory_ends(
    folder: Path, changes: dict[str, int], tries: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights, optimizer and metrics are the same, to the last bit."""
    options = {"optimizer": {"chunk_tokens": 4, "kept_tokens": 12} | changes}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "MIN_CHUNK_TOKENS", 1)
        one = learner(folder, **options)
        counting = Ending(patch, set())
        told, right = changed(one)
        assert told.memory_retries == 0
        moments = counting.moments
    assert moments > 8
    for at in range(1, moments + 1, max(1, moments // tries)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(packing, "MIN_CHUNK_TOKENS", 1)
            one = learner(folder, **options)
            Ending(patch, {at})
            with caplog.at_level(logging.WARNING, "polar.train.memory"):
                again, found = changed(one)
        assert again.memory_retries == 1
        assert "ran out of memory and is computed again" in caplog.text
        for name, tensor in right.items():
            if changes:  # scores are computed in shorter chunks then, which rounds otherwise
                torch.testing.assert_close(found[name], tensor, rtol=1e-2, atol=1e-4)
            else:
                assert torch.equal(found[name], tensor), f"{name}, memory ended at moment {at}"
        assert (again.loss, again.clipped) == pytest.approx((told.loss, told.clipped), abs=1e-6)
        assert again.updates == told.updates


@pytest.mark.parametrize("first", leave_to_slow(range(1, 5), but=[1]))
def test_gradients_are_exact_wherever_memory_ends(first: int) -> None:
    """Of packed trees with many chunks, at every one of them: a quarter of them in each case."""
    torch.manual_seed(1)
    model, packed = llama(), pack_kind("forked")

    TreeModel(model)  # which tries it, once

    def gradient() -> tuple[Tensor, int]:
        over_trees, retries = TreeModel(model, chunk_tokens=24, kept_tokens=48), OutOfMemoryRetrier(torch.device("cpu"))
        model.zero_grad()
        retries.run(
            "It",
            lambda: over_trees.backward(packed, total),
            discard=lambda: model.zero_grad(set_to_none=True),
            reduce_memory=lambda: over_trees.reduce_memory(packed, training=True),
            advice=str,
        )
        return gradients(model), retries.count

    with pytest.MonkeyPatch.context() as patch:
        counting = Ending(patch, set())
        right, _ = gradient()
    for at in range(first, counting.moments + 1, 4):
        with pytest.MonkeyPatch.context() as patch:
            Ending(patch, {at})
            found, retries = gradient()
        assert retries == 1
        assert torch.equal(found, right), f"memory ended at moment {at} of {counting.moments}"


def test_a_real_end_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has less than all that is to be kept takes, and more than a step needs at least."""
    monkeypatch.setattr(packing, "MIN_CHUNK_TOKENS", 12)
    torch.manual_seed(1)
    model, packed = llama(), pack_kind("linear")
    over_trees = TreeModel(model, chunk_tokens=48, kept_tokens=10**6)
    with Memory() as roomy:
        over_trees.backward(packed, total)
    right = gradients(model)
    retries = OutOfMemoryRetrier(torch.device("cpu"))
    model.zero_grad()
    with Memory(limit=0.6 * roomy.most) as narrow:
        retries.run(
            "It",
            lambda: over_trees.backward(packed, total),
            discard=lambda: model.zero_grad(set_to_none=True),
            reduce_memory=lambda: over_trees.reduce_memory(packed, training=True),
            advice=str,
        )
    assert retries.count == narrow.ended >= 1
    assert (gradients(model) - right).norm() / right.norm() < 1e-5
    with narrow:
        over_trees.backward(packed, total)  # what follows is cut the same way at once
    assert narrow.ended == retries.count


def test_what_never_fits_is_told_and_changes_nothing(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "MIN_CHUNK_TOKENS", 2)
        one = learner(folder, optimizer={"chunk_tokens": 4, "kept_tokens": 12})
        before = {name: tensor.clone() for name, tensor in one.get_trained_weights().items()}
        ending = Ending(patch, set(range(1, 1000)))
        with pytest.raises(OutOfMemoryError, match=r"^Step 7 does not fit into memory.*Set model.lora = \{\}: "):
            one.step(batch(), 7)
        assert ending.moments <= 5  # tries are bounded
    assert all(torch.equal(one.get_trained_weights()[name], tensor) for name, tensor in before.items())
    assert all(parameter.grad is None for parameter in one.model.parameters())
    one.step(batch(), 7)


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"lora": {"rank": 2}}, 'Set model.dtype = "bfloat16".'),
        ({"lora": {"rank": 2}, "dtype": "bfloat16"}, "Give tasks a smaller budget of tokens"),
    ],
)
def test_the_setting_that_helps_is_named(folder: Path, changes: dict[str, Any], advice: str) -> None:
    assert learner(folder, model=changes)._suggest_memory_setting().startswith(advice)


def test_other_errors_are_not_taken_for_it(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        one = learner(folder)
        patch.setattr(TreeModel, "backward", lambda *_: (_ for _ in ()).throw(RuntimeError("shapes differ")))
        with pytest.raises(RuntimeError, match="shapes differ"):
            one.step(batch(), 1)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"), True),
        (MemoryError(), True),
        (ValueError("out of memory"), False),
        (RuntimeError("an illegal memory access was encountered"), False),
    ],
)
def test_which_errors_say_so(error: Exception, expected: bool) -> None:
    assert torch_runtime.is_out_of_memory(error) is expected


# What is left behind


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is freed is freed because nobody refers to it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_no_chunk_outlives_its_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one has its memory."""
    alive: list[weakref.ref[Tensor]] = []
    after: list[int] = []
    backward = TreeModel._backward

    def watched(self: TreeModel, packed: PackedTrees, one: tree_model._ChunkPass, *others: Any) -> None:
        backward(self, packed, one, *others)
        after.append(sum(it() is not None for it in alive))
        alive[:] = [weakref.ref(it) for it in one.keys.values()]

    monkeypatch.setattr(TreeModel, "_backward", watched)
    TreeModel(llama(), chunk_tokens=24, kept_tokens=48).backward(pack_kind(), total)
    assert len(after) > 5
    assert set(after) == {0}
    assert all(it() is None for it in alive)


@pytest.mark.usefixtures("no_collector")
def test_what_failed_is_freed_before_the_next_try() -> None:
    alive: list[weakref.ref[Tensor]] = []
    seen: list[int] = []

    def compute() -> str:
        if seen:
            return "done"
        large = torch.ones(3)
        alive.append(weakref.ref(large))
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def reduce_memory() -> str:
        seen.append(sum(it() is not None for it in alive))
        return "less"

    found = OutOfMemoryRetrier(torch.device("cpu")).run(
        "It", compute, discard=lambda: None, reduce_memory=reduce_memory, advice=str
    )
    assert (found, seen) == ("done", [0])


def test_free_memory_can_be_joined_unless_somebody_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in memory._ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    memory.enable_expandable_segments()
    emptied: list[None] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100, 1000))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(None))
    memory.release_fragmented_memory(torch.device("cuda"), 500)
    assert not emptied  # the allocator does it by itself
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    memory.enable_expandable_segments()  # which leaves that as it is
    memory.release_fragmented_memory(torch.device("cuda"), 50)
    assert not emptied
    memory.release_fragmented_memory(torch.device("cuda"), 500)
    memory.release_fragmented_memory(torch.device("cpu"), 500)
    assert len(emptied) == 1


def test_adapters_are_merged_elsewhere_where_the_device_is_full(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = learner(folder, model={"lora": {"rank": 2}}).model
    right = merged_weights.get_merged_weights(model)
    merged, calls = merged_weights._merge_adapters, []

    def full(*args: Any) -> Tensor:
        calls.append(args)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return merged(*args)

    monkeypatch.setattr(merged_weights, "_merge_adapters", full)
    found = merged_weights.get_merged_weights(model)
    assert all(torch.equal(found[name], tensor) for name, tensor in right.items())


def test_a_checkpoint_of_another_device_has_its_optimizer_here(folder: Path) -> None:
    """Steps of a GPU's are one kernel, which takes no memory; a CPU's are not."""
    one, other = learner(folder), learner(folder)
    one.step(batch(), 1)
    state = copy.deepcopy(one.state_dict())
    for part in state["optimizer"]["param_groups"]:
        part["fused"] = True
    other.restore(one.get_trained_weights(), state)
    assert [part["fused"] for part in other._optimizer.param_groups] == [None]
    one.step(batch(), 2)
    other.step(batch(), 2)
    assert all(
        torch.equal(tensor, other.get_trained_weights()[name]) for name, tensor in one.get_trained_weights().items()
    )


def test_less_is_kept_of_the_same_chunks_before_they_are_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MIN_CHUNK_TOKENS", 8)
    cutter, packed = Chunker(32, MemoryBudget(10**6)), pack_kind()
    cuts = [cutter.plan(packed, training=True)]
    while cutter.reduce_memory(packed, training=True) is not None:
        cuts.append(cutter.plan(packed, training=True))
    assert len(cuts) <= 6
    edges = [[(chunk.start, chunk.stop) for chunk in one.chunks] for one in cuts]
    kept = [one.need.kept_tokens for one in cuts]
    assert edges[0] == edges[1]
    assert kept == sorted(kept, reverse=True)
    assert max(map(len, cuts[-1].chunks)) <= 8
    assert cutter.plan(packed, training=False).need.kept_tokens == 0
