"""The model that is trained: loaded from a folder, with adapters or without, on whatever device there is."""

from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from polar.errors import ConfigError
from polar.torch_runtime import is_out_of_memory
from polar.train.memory import OutOfMemoryError
from polar.train.settings import LoraSettings, ModelSettings


def resolve_device(settings: ModelSettings) -> torch.device:
    if settings.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(settings.device)
    except RuntimeError as error:
        raise ConfigError(f"model.device: there is no device {settings.device!r}: name cpu, or cuda.") from error
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # depends on how torch was built
        reason = str(error).partition("\n")[0].partition(". ")[0].rstrip(".")
        raise ConfigError(
            f"model.device: {settings.device!r} can't be used here: {reason}. Set cpu or auto."
        ) from error
    return device


def load_model(folder: Path, settings: ModelSettings) -> Any:
    """From local files alone. What isn't trained has no gradient. Raises ConfigError."""
    transformers = import_module("transformers")
    if not (folder / "config.json").exists():
        raise ConfigError(f"There is no model in {folder}: it would have a config.json. Set model.folder.")
    device = resolve_device(settings)  # before the weights are read, which takes long
    transformers.utils.logging.disable_progress_bar()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, settings.dtype), local_files_only=True
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ConfigError(f"The model in {folder} can't be loaded: {error}.") from error
    try:
        model.to(device)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        hint = 'model.dtype = "bfloat16"' if settings.dtype == "float32" else "model.device, or a smaller model"
        raise OutOfMemoryError(
            f"The model in {folder} does not fit into the memory of {device}: set {hint}."
        ) from error
    model.eval()  # without dropout: log-probabilities are to be those of the policy
    if settings.lora is not None:
        return _add_adapters(model, settings.lora)
    if settings.trainable_layers is not None:
        _freeze_below(model, settings.trainable_layers)
    return model


def load_frozen_copy(folder: Path, settings: ModelSettings) -> Any:
    """The model as it was at first, to be compared with."""
    model = load_model(folder, settings.model_copy(update={"lora": None, "trainable_layers": None}))
    return model.requires_grad_(False)


def get_trainable_parameters(model: Any) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _add_adapters(model: Any, settings: LoraSettings) -> Any:
    peft = import_module("peft")
    config = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=settings.targets,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    try:
        return peft.get_peft_model(model, config).eval()
    except ValueError as error:
        raise ConfigError(f"model.lora.targets: {error}") from error


def _freeze_below(model: Any, layers: int) -> None:
    """Only the last layers, and the norm behind them, are trained."""
    decoder = model.get_decoder()
    if layers > len(decoder.layers):
        raise ConfigError(f"model.trainable_layers: the model has {len(decoder.layers)} layers, and not {layers}.")
    model.requires_grad_(False)
    for layer in decoder.layers[-layers:]:
        layer.requires_grad_(True)
    decoder.norm.requires_grad_(True)
