"""A model of two layers with random weights, and what plain forward passes say of sampled tokens."""

import json
import shutil
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from polar.engines.api_server.backend import GenerationRequest, SampledToken, SamplingOptions
from polar.engines.embedded.core import EngineCore
from polar.engines.embedded.generation import Generation
from polar.engines.embedded.options import EmbeddedOptions
from polar.engines.embedded.weights import load_model
from polar.engines.scripted import TOKENIZER_FOLDER
from polar.rendering.tokenizer import Tokenizer

OPTIONS = EmbeddedOptions(device="cpu", memory_gib=0.004, context_length=512, threads=1)


def make_model_folder(folder: Path, kind: str = "llama", **changes: Any) -> Path:
    """Its distributions are far from even. It never ends its turn by itself, so that a generation lasts."""
    torch.manual_seed(0)
    tokenizer = Tokenizer.load(TOKENIZER_FOLDER)
    config = AutoConfig.for_model(
        kind,
        vocab_size=tokenizer.vocabulary_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.3,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
        **changes,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for file in TOKENIZER_FOLDER.iterdir():
        shutil.copy(file, folder)
    config_file = folder / "tokenizer_config.json"
    told = json.loads(config_file.read_text())
    del told["eos_token"]
    config_file.write_text(json.dumps(told))
    return folder


def save_perturbed_weights(folder: Path, path: Path, seed: int, by: float = 0.1) -> Path:
    """The weights of a folder, moved at random, as a file of weights."""
    model = _load_model(folder)
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: weight + by * torch.randn(weight.shape, generator=generator)
        for name, weight in model.state_dict().items()
        if name != "lm_head.weight"  # tied
    }
    save_file(weights, path)
    return path


def make_updated_folder(folder: Path, path: Path, target: Path) -> Path:
    """A folder as the model would be saved after such an update."""
    shutil.copytree(folder, target)
    save_file(load_file(path), target / "model.safetensors", metadata={"format": "pt"})
    return target


def _load_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


class Teacher:
    """Plain forward passes, by the version of the weights."""

    def __init__(self, folder: Path, updates: Mapping[int, Path] | None = None) -> None:
        self._models = {0: _load_model(folder)}
        for version, path in (updates or {}).items():
            model = _load_model(folder)
            model.load_state_dict(load_file(path), strict=False)
            self._models[version] = model

    @torch.inference_mode()
    def logprobs(
        self, prompt: Sequence[int], ids: Sequence[int], version: int = 0, temperature: float = 1.0
    ) -> torch.Tensor:
        logits = self._models[version](torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        every = torch.log_softmax(logits.float() / temperature, -1)
        return every.gather(1, torch.tensor(ids)[:, None])[:, 0]

    def find_worst_difference(self, generation: Generation, temperature: float = 1.0) -> float:
        """The largest difference between what was reported and what the weights of each token's version say."""
        tokens = generation.tokens
        ids = [token.id for token in tokens]
        said = {
            version: self.logprobs(generation.request.prompt, ids, version, temperature)
            for version in {token.version for token in tokens}
        }
        reported = list_logprobs(tokens)
        return max(abs(float(said[token.version][at]) - reported[at]) for at, token in enumerate(tokens))


class PassLimiter:
    """Within this context a core makes as many passes of its model as it is allowed to, and no more. Each samples a
    token of every generation that runs."""

    def __init__(self, core: EngineCore) -> None:
        self._batcher = core._batcher
        self._step = self._batcher._step
        self._allowed = threading.Semaphore(0)

    def __enter__(self) -> "PassLimiter":
        self._batcher._step = self._wait_and_step  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        self._batcher._step = self._step  # type: ignore[method-assign]
        self.allow(1)  # for the one that waits

    def allow(self, count: int) -> None:
        self._allowed.release(count)

    def _wait_and_step(self) -> bool:
        self._allowed.acquire()
        worked = self._step()
        if not worked:
            self._allowed.release()
        return worked


@asynccontextmanager
async def open_core(folder: Path, **options: Any) -> AsyncIterator[EngineCore]:
    changed = OPTIONS.model_copy(update=options)
    core = EngineCore(load_model(folder, changed), Tokenizer.load(folder), changed)
    try:
        yield core
    finally:
        await core.stop()


def start_generation(
    core: EngineCore,
    prompt: Sequence[int],
    max_tokens: int,
    sampling: SamplingOptions | None = None,
    **request: Any,
) -> Generation:
    ids = np.asarray(prompt, np.int32)
    generation = core.make_generation(GenerationRequest(ids, max_tokens, sampling or SamplingOptions(), **request))
    core.start_generation(generation)
    return generation


async def generate_all(core: EngineCore, prompt: Sequence[int], max_tokens: int = 16, **choosing: Any) -> Generation:
    """A generation, to its end."""
    generation = start_generation(core, prompt, max_tokens, SamplingOptions(**choosing))
    async for _ in generation.sample_steps():
        pass
    return generation


def list_token_ids(tokens: Sequence[SampledToken]) -> list[int]:
    return [token.id for token in tokens]


def list_logprobs(tokens: Sequence[SampledToken]) -> list[float]:
    """One for each token: the engine reports them all."""
    reported = [token.logprob for token in tokens if token.logprob is not None]
    assert len(reported) == len(tokens)
    return reported
