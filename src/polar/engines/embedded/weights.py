"""A model out of a folder, and new weights for it in place."""

import os
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import Struct
from safetensors import SafetensorError, safe_open

from polar.engines.embedded import attention
from polar.engines.embedded.options import EmbeddedOptions
from polar.errors import ConfigError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_GIB = 2**30


def load_model(folder: Path, options: EmbeddedOptions) -> Any:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"There is no model in {folder}: it would have a config.json.")
    transformers: Any = import_module("transformers")  # its types are of little help
    transformers.utils.logging.disable_progress_bar()
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    attention.register_attention()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=_DTYPES.get(options.dtype, dtype),
            local_files_only=True,
            attn_implementation=attention.ATTENTION_NAME,
        )
        model = model.to(device).eval().requires_grad_(False)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ConfigError(f"The model in {folder} can't be loaded: {error}.") from error
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if strange := kinds - {"full_attention", "sliding_attention"}:
        raise ConfigError(
            f"The embedded engine can't serve the model in {folder}, which has layers of {', '.join(sorted(strange))}: "
            "use vLLM."
        )
    return model


def count_cache_tokens(model: Any, options: EmbeddedOptions) -> int:
    """For how many tokens there is room in the cache of keys and values."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    bytes_per_token: int = 2 * config.num_hidden_layers * heads * width * model.dtype.itemsize
    memory = options.memory_gib or (2.0 if model.device.type == "cpu" else 8.0)
    return int(memory * _GIB) // bytes_per_token


class WeightUpdate(Struct, frozen=True):
    """Weights in a file of safetensors, by the model's own names, and the version that they are."""

    path: str
    version: int


class NewWeights:
    """A file of weights that fits a model: looked through before anything of the model is touched."""

    def __init__(self, model: Any, path: Path) -> None:
        """Raises ConfigError where the file is not readable, or holds other weights than the model has."""
        self._path = path
        self._own: dict[str, torch.Tensor] = model.state_dict()
        try:
            with safe_open(path, "pt") as file:
                shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"The weights in {path} can't be read: {error}.") from error
        if unknown := shapes.keys() - self._own.keys():
            raise ConfigError(f"{path} holds weights that the model doesn't have: {_format_names(unknown)}.")
        # Tied weights have several names: one is enough.
        given = {self._own[name].data_ptr() for name in shapes}
        if missing := [name for name, own in self._own.items() if own.data_ptr() not in given]:
            raise ConfigError(f"{path} lacks weights: {_format_names(missing)}; an update has all of them.")
        if wrong := [name for name, shape in shapes.items() if shape != tuple(self._own[name].shape)]:
            raise ConfigError(f"{path} has weights of other shapes than the model: {_format_names(wrong)}.")

    @torch.inference_mode()
    def copy_into_model(self) -> None:
        """Into the model. Where this fails, the model is neither the old one nor the new one."""
        with safe_open(self._path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                self._own[name].copy_(file.get_tensor(name))
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def _format_names(names: Any) -> str:
    first = sorted(names)[:3]
    return ", ".join(first) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# What a restart begins with


def save_update(state: Path, update: WeightUpdate) -> None:
    """Whole or not at all."""
    new = state.with_name(state.name + ".new")
    new.write_bytes(msgspec.json.encode(update))
    os.replace(new, state)


def load_update(state: Path) -> WeightUpdate | None:
    try:
        return msgspec.json.decode(state.read_bytes(), type=WeightUpdate)
    except (OSError, msgspec.DecodeError):
        return None
