"""What verl lacks to run on a machine without GPUs, for test_verl.py: a platform, and an engine. verl imports it.

The platform is the CPU. The engine is Polar's embedded one, in the place of the vLLM that verl would start: the test
has started it, its address is in the environment, and verl's workers send it their weights as a file.
`recorded_sync` and `recorded_colocate_async` are the bridge's modes, which also write down what goes into the loss.
"""

import asyncio
import contextlib
import functools
import json
import os
import sys
import types
import urllib.request
from pathlib import Path
from typing import Any

import ray
import torch
import transfer_queue
from safetensors.torch import save_file
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

FIELDS = ("prompts", "responses", "response_mask", "rollout_log_probs", "advantages", "rm_scores")
ENGINE, FOLDER = os.environ["TEST_ENGINE"], Path(os.environ["TEST_FOLDER"])


def _module() -> types.ModuleType:
    """torch.cpu, with what torch.cuda has besides."""
    made = types.ModuleType("torch_cpu")
    made.__dict__.update(torch.cpu.__dict__)
    for name in ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"):
        setattr(made, name, lambda *_: 0)
    for name in ("empty_cache", "set_device", "manual_seed", "manual_seed_all", "ipc_collect"):
        setattr(made, name, lambda *_: None)
    made.mem_get_info = lambda *_: (1, 1)
    made.is_available = lambda: False
    made.get_device_name = lambda *_: "CPU"
    made.current_device = lambda: "cpu"
    made.get_rng_state = torch.get_rng_state
    made.set_rng_state = torch.set_rng_state
    return made


@PlatformRegistry.register(platform="cpu")
class Cpu(PlatformBase):
    device_name, vendor_name, device_module = "cpu", "none", _module()

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"  # where tensors are moved to

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None: ...

    def manual_seed_all(self, seed: int) -> None: ...

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> Any:
        return contextlib.nullcontext()

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"  # Ray is told of one, since verl counts them

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_gpus": num_gpus}

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None


class Server:
    """The engine, as verl knows one: what it is told here has no meaning for an engine that is always awake."""

    async def _nothing(self, **_: Any) -> None: ...

    sleep = wake_up = abort_all_requests = resume_generation = clear_kv_cache = _nothing
    release_kv_cache = resume_kv_cache = _nothing


def _replica() -> Any:
    from verl.workers.rollout.replica import RolloutReplica

    class Replica(RolloutReplica):
        async def launch_servers(self) -> None:
            self.servers = [ray.remote(Server).options(num_cpus=0).remote()]
            self._server_handle = self.servers[0]
            self._server_address = ENGINE.removeprefix("http://")

    return Replica


def _adapter() -> Any:
    from verl.workers.rollout.base import BaseRollout

    class Adapter(BaseRollout):
        async def resume(self, tags: list[str]) -> None: ...

        async def release(self) -> None: ...

        async def update_weights(self, weights: Any, wire_format: str = "named_tensors", **more: Any) -> None:
            version = more["global_steps"]
            path = FOLDER / f"weights-{version}.safetensors"
            save_file({name: tensor.detach().clone().contiguous() for name, tensor in weights}, path)
            await asyncio.to_thread(_load, path, version)

    return Adapter


def _load(path: Path, version: int) -> None:
    body = json.dumps({"path": str(path), "version": version}).encode()
    request = urllib.request.Request(f"{ENGINE}/update_weights", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        answer.read()


def _recorded(mode: str) -> Any:
    """The bridge's trainer, which also writes down what goes into the loss."""
    from verl.trainer.ppo.v1 import get_trainer_cls

    class Recorded(get_trainer_cls(f"polar_{mode}")):  # type: ignore[misc]
        def _update_actor(self, batch: Any, metrics: Any) -> Any:
            data = transfer_queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id)
            rows = []
            for index, (key, tag) in enumerate(zip(batch.keys, batch.tags, strict=True)):
                row = {
                    name: data[name][index].tolist()
                    for name in (
                        "prompts",
                        "responses",
                        "response_mask",
                        "rollout_log_probs",
                        "advantages",
                        "rm_scores",
                    )
                }
                told = None if tag.get("is_padding") else dict(list(data["extra_fields"])[index])
                rows.append({"key": key, "tag": tag, "extra_fields": told, **row})
            output = super()._update_actor(batch, metrics)
            steps = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
            written = {"step": self.global_steps, "rows": rows, "metrics": steps}
            (FOLDER / f"step-{self.global_steps}.json").write_text(json.dumps(written, default=str))
            return output

    return Recorded


Adapter: Any = None


def install() -> None:
    from verl.models.transformers import monkey_patch
    from verl.trainer.ppo.v1 import register_trainer
    from verl.workers import engine_workers
    from verl.workers.rollout import base, replica

    import polar.bridges.verl.trainer  # noqa: F401  # which needs the platform, and gives the modes

    # The trl beside it is newer than verl's, which only wants to know whether a value head is one of trl's.
    monkey_patch.is_trl_available = lambda: False
    # verl names a backend for the CPU and one for its device, which are the same here.
    begin = engine_workers.initialize_global_process_group_ray
    engine_workers.initialize_global_process_group_ray = functools.partial(begin, backend="gloo")
    global Adapter
    Adapter = _adapter()
    replica.RolloutReplicaRegistry.register("embedded", _replica)
    base._ROLLOUT_REGISTRY["embedded", "async"] = f"{__name__}.Adapter"
    for mode in ("sync", "colocate_async"):
        register_trainer(f"recorded_{mode}")(_recorded(mode))


if "verl" in sys.modules:
    install()
