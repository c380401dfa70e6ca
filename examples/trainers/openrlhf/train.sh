#!/bin/sh
# GRPO with OpenRLHF over the example tasks, on one node with 8 GPUs that train and sample in turns. In another terminal:
#   POLAR_ENGINE__KIND=vllm POLAR_ENGINE__URLS='[]' POLAR_ENGINE__TOKENIZER=$MODEL polar up
# whose engines are OpenRLHF's as soon as they are there.
set -eu
here=$(dirname "$0")
: "${MODEL:=Qwen/Qwen3-4B-Instruct-2507}"
python "$here/rows.py" "$here/../../tasks" > rows.jsonl
POLAR_BRIDGE="$here/bridge.toml" exec python -m polar.bridges.openrlhf \
    --data.prompt_dataset rows.jsonl --data.input_key prompt --data.label_key task_id --data.max_len 16384 \
    --rollout.batch_size 8 --rollout.n_samples_per_prompt 8 --train.batch_size 128 \
    --rollout.micro_batch_size 1 --train.micro_batch_size 1 \
    --algo.advantage.estimator group_norm --algo.advantage.is_correction_level token \
    --algo.advantage.is_correction_mode clip --algo.kl.init_coef 0 \
    --actor.model_name_or_path "$MODEL" --actor.num_gpus_per_node 8 \
    --vllm.num_engines 8 --vllm.tensor_parallel_size 1 --vllm.enable_sleep \
    --train.colocate_all --ds.enable_sleep \
    "$@"
