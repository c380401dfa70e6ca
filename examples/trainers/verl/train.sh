#!/bin/sh
# GRPO with verl over the example tasks, on one node with 8 GPUs. From Polar's folder; in another terminal:
#   POLAR_ENGINE__KIND=vllm POLAR_ENGINE__URLS='[]' POLAR_ENGINE__TOKENIZER=$MODEL polar up
# whose engines are verl's as soon as those are up.
set -eu
here=$(dirname "$0")
: "${MODEL:=Qwen/Qwen3-4B-Instruct-2507}"
python "$here/rows.py" examples/tasks -o tasks.parquet
export VERL_USE_EXTERNAL_MODULES=polar.bridges.verl.trainer
exec python -m verl.trainer.main_ppo \
    trainer.v1.trainer_mode=polar_sync \
    actor_rollout_ref.rollout.agent.agent_loop_config_path="$here/polar.yaml" \
    data.train_files=tasks.parquet data.val_files=tasks.parquet \
    algorithm.adv_estimator=grpo \
    actor_rollout_ref.actor.loss_agg_mode=token-mean \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_mini_batch_size=8 \
    data.train_batch_size=8 \
    trainer.n_gpus_per_node=8 trainer.val_before_train=False trainer.logger='[console]' \
    "$@"
