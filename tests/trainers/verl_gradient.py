"""Asks the bridge for a group, as verl's worker does, and compares gradients of verl's own loss and engine: of the
sessions as they were merged, and of the same with some of them split into their calls.

    python verl_gradient.py SETTINGS OVERRIDE...

SETTINGS is JSON, of the bridge; the others are verl's. Runs in the trainers' environment, see test_verl.py.
"""

import asyncio
import json
import sys
from typing import Any

import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, DictConfigWrap
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import ActorRolloutRefWorker

from polar.bridges.rollouts import get_shared_groups
from polar.bridges.verl.agent_loop import AgentLoop, build_outputs
from polar.client.async_client import AsyncClient
from polar.export.base import SessionItem
from polar.export.verl import list_trajectory_keys, to_data_proto

SESSIONS = 4
PARAMS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
Rows = list[dict[str, Any]]


async def sessions(settings: dict[str, Any], config: Any) -> tuple[list[Rows], list[Rows]]:
    """Each session's rows: merged, by verl's way of asking; and one for each call of the same sessions."""
    loop = AgentLoop(settings=settings, trainer_config=DictConfigWrap(config))
    asked = {"task_id": "plain-0", "polar_key": "step-1", "polar_samples": SESSIONS}
    given = await asyncio.gather(*(loop.run(PARAMS, **asked, session_id=number) for number in range(SESSIONS)))
    merged = [[output.model_dump() for output in session] for session in given]
    async with AsyncClient(settings["server"], settings["token"]) as client:
        found = {}
        async for result in client.results(builder="per_request", follow=False):
            found[result.session_id] = build_outputs(SessionItem.from_result(result))
    await get_shared_groups(loop._settings).rollouts.close()
    split = [found[rows[0]["extra_fields"]["session_id"]] for rows in merged]
    return merged, split


def gradient(worker: Any, chosen: list[Rows], mode: str) -> dict[str, torch.Tensor]:
    """Of verl's loss over these sessions, every second of which has earned something."""
    rows = [row | {"reward_score": float(number % 2)} for number, session in enumerate(chosen) for row in session]
    rows = [AgentLoopOutput(**row).model_dump() for row in rows]
    batch = to_data_proto(rows, pad_token_id=0)
    batch.batch["token_level_rewards"] = batch.batch["rm_scores"]
    batch = compute_advantage_for_multi_trajectories(batch, batch_keys=list_trajectory_keys(rows), adv_estimator="grpo")
    fields = []
    for row, advantages in zip(rows, batch.batch["advantages"], strict=True):
        field = AgentLoopOutput(**row).as_dict()
        ids = torch.cat([field["prompts"], field["responses"]])
        fields.append(
            {
                "prompts": field["prompts"],
                "responses": field["responses"],
                "input_ids": ids,
                "position_ids": torch.arange(len(ids)),
                "response_mask": field["response_mask"],
                "loss_mask": field["response_mask"],
                "old_log_probs": field["rollout_log_probs"],
                "advantages": advantages[: len(field["responses"])],
            }
        )
    ragged = {name: tu.nested_tensor_from_tensor_list([field[name] for field in fields]) for name in fields[0]}
    data = TensorDict(ragged, batch_size=len(rows))
    tu.assign_non_tensor(
        data,
        global_batch_size=len(rows),
        temperature=1.0,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=1,
        use_remove_padding=False,
        calculate_entropy=False,
    )
    engine = worker.actor.engine
    object.__setattr__(worker.loss_fn.keywords["config"], "loss_agg_mode", mode)  # frozen, for a run has one
    with engine.train_mode(disable_auto_offload=True):
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(data, worker.loss_fn, forward_only=False)
        return {name: one.grad.full_tensor().clone() for name, one in engine.module.named_parameters()}


def distance(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Relative to the gradient's own size."""
    size = max(float(one.norm()) for one in left.values())
    return max(float((left[name] - right[name]).norm()) for name in left) / size


def main() -> None:
    settings, overrides = json.loads(sys.argv[1]), sys.argv[2:]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=overrides)
    OmegaConf.resolve(config)
    OmegaConf.set_readonly(config, False)
    merged, split = asyncio.run(sessions(settings, config))
    assert [len(rows) for rows in merged] == [1] * SESSIONS
    assert [len(rows) for rows in split] == [2] * SESSIONS
    some = [*split[: SESSIONS // 2], *merged[SESSIONS // 2 :]]  # a whole group of the same kind hides a weight a row
    worker = ActorRolloutRefWorker(config.actor_rollout_ref, role="actor")
    worker.init_model()
    told = {
        mode: [distance(gradient(worker, merged, mode), gradient(worker, other, mode)) for other in (split, some)]
        for mode in ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum")
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
