"""A model's weights as engines take them: every tensor under its Hugging Face name, adapters merged in."""

from typing import Any

import torch
from torch import Tensor

from polar.errors import ConfigError
from polar.torch_runtime import is_out_of_memory, release_memory

_BASE_LAYER_PREFIX = "base_layer."


@torch.no_grad()
def get_merged_weights(model: Any) -> dict[str, Tensor]:
    """Tensors of the model itself where nothing is to be merged, so they hold until its next step. The model is left as
    it is: merging an adapter into it and out again would leave rounding errors behind with every update.

    Tied tensors appear under each of their names. Engines that pack their output layer for speed (vLLM on CPUs) would
    otherwise go on with the old one.

    Merged ones are the model once more. Where its device has no memory for that, they lie in the machine's."""
    try:
        return _collect_weights(model, None)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    release_memory(next(model.parameters()).device)
    return _collect_weights(model, torch.device("cpu"))


def _collect_weights(model: Any, device: torch.device | None) -> dict[str, Tensor]:
    """Merged ones go to the device, one after the other; without one they stay where they are."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    adapted = {name: module for name, module in base.named_modules() if hasattr(module, "get_delta_weight")}
    weights: dict[str, Tensor] = {}
    for name, tensor in base.state_dict().items():
        if ".modules_to_save." in name or ".original_module." in name:
            raise ConfigError(f"{name} is trained as a whole beside an adapter, which can't be sent to an engine.")
        owner = _find_owner(name, adapted)
        if owner is None:
            weights[name] = tensor
            continue
        local_name = name.removeprefix(f"{owner}.")
        if local_name.startswith(_BASE_LAYER_PREFIX):
            merged = (
                _merge_adapters(tensor, adapted[owner]).to(device)
                if local_name == f"{_BASE_LAYER_PREFIX}weight"
                else tensor
            )
            weights[f"{owner}.{local_name.removeprefix(_BASE_LAYER_PREFIX)}"] = merged
    return weights


def _find_owner(name: str, adapted: dict[str, Any]) -> str | None:
    """The adapted layer that a tensor belongs to."""
    while "." in name:
        name = name.rpartition(".")[0]
        if name in adapted:
            return name
    return None


def _merge_adapters(weight: Tensor, layer: Any) -> Tensor:
    if layer.merged:
        return weight
    merged = weight.float()
    for adapter in layer.active_adapters:
        merged = merged + layer.get_delta_weight(adapter).float()
    return merged.to(weight.dtype)
