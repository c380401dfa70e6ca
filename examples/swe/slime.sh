#!/bin/bash
# SWE-Gym to GRPO on Qwen3.5-4B with slime, on one node with 8 GPUs: four train, four sample.
# Run it in slime's repository, in an environment that has Polar as well, beside the rollout service:
#
#     polar up --config POLAR/examples/swe/slime-service.toml &
#     bash POLAR/examples/swe/slime.sh
set -euo pipefail
here=$(dirname "$(realpath "$0")")
: "${MODEL:=/models/Qwen3.5-4B}"
source scripts/models/qwen3.5-4B.sh    # slime's own: MODEL_ARGS

ray start --head --num-gpus 8 --disable-usage-stats
trap 'ray stop' EXIT
env='{"env_vars": {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONPATH": "'"${MEGATRON:-Megatron-LM}"'"}}'

ray job submit --address http://127.0.0.1:8265 --runtime-env-json "$env" -- python3 train_async.py \
    "${MODEL_ARGS[@]}" \
    --actor-num-nodes 1 --actor-num-gpus-per-node 4 \
    --rollout-num-gpus 4 --rollout-num-gpus-per-engine 1 --sglang-mem-fraction-static 0.85 \
    --hf-checkpoint "$MODEL" --ref-load "${MODEL}_torch_dist" \
    --save runs/swe-slime --load runs/swe-slime --save-interval 20 \
    --rollout-function-path polar.bridges.slime.generate_rollout \
    --custom-reward-post-process-path polar.bridges.slime.normalize_rewards \
    --custom-config-path "$here/slime.yaml" \
    --prompt-data /data/swe/gym.jsonl --input-key task_id --rollout-shuffle \
    --num-rollout 200 --rollout-batch-size 16 --n-samples-per-prompt 8 --global-batch-size 128 \
    --rollout-temperature 1.0 --rollout-max-response-len 32768 \
    --advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28 --use-tis \
    --optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98 \
    --tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 \
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 \
    --use-dynamic-batch-size --max-tokens-per-gpu 32768 \
    --attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32 \
    --attention-softmax-in-fp32 --attention-backend flash
