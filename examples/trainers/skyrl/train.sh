#!/bin/sh
# GRPO with SkyRL over the example tasks, on one node with 8 GPUs (4 train, 4 sample). In another terminal:
#   POLAR_ENGINE__KIND=vllm POLAR_ENGINE__URLS='[]' POLAR_ENGINE__TOKENIZER=$MODEL polar up
# whose engines are SkyRL's as soon as they are there.
set -eu
here=$(dirname "$0")
: "${MODEL:=Qwen/Qwen3-4B-Instruct-2507}"
python "$here/rows.py" "$here/../../tasks" > rows.jsonl
POLAR_BRIDGE="$here/bridge.toml" exec python -m skyrl.train.entrypoints.main_base \
    trainer.override_entrypoint=polar.bridges.skyrl \
    data.train_data="['rows.jsonl']" \
    generator.step_wise_trajectories=true \
    generator.n_samples_per_prompt=8 \
    trainer.algorithm.advantage_estimator=grpo \
    trainer.algorithm.loss_reduction=token_mean \
    trainer.algorithm.use_kl_loss=false \
    trainer.policy.model.path="$MODEL" \
    trainer.train_batch_size=8 trainer.policy_mini_batch_size=8 \
    trainer.eval_interval=-1 trainer.logger=console \
    trainer.placement.colocate_all=false \
    trainer.placement.policy_num_gpus_per_node=4 \
    generator.inference_engine.num_engines=4 \
    generator.inference_engine.tensor_parallel_size=1 \
    "$@"
