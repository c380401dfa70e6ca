#!/bin/bash
# GRPO with slime over Polar's sessions. Runs in slime's folder, on one node with 8 GPUs: 4 train, 4 sample.
#
#     polar up                                       with the [engine] of docs/trainers/slime.md
#     MODEL=/models/Qwen3-4B POLAR=/path/to/polar bash train.sh
#
# For Miles the same, with `train_async.py` of Miles.
set -e
: "${MODEL:?the folder of the model}" "${POLAR:?the folder of Polar}"

# A row for each task; slime asks for nothing else of it.
python3 - "$POLAR"/examples/tasks > tasks.jsonl <<'PY'
import json, sys
from polar.client.submission import load_tasks
for task in load_tasks(sys.argv[1], run="default"):
    print(json.dumps({"task_id": task.task_id}))
PY

python3 train_async.py \
    --rollout-function-path polar.bridges.slime.generate_rollout \
    --custom-reward-post-process-path polar.bridges.slime.normalize_rewards \
    --custom-config-path "$POLAR"/examples/trainers/slime/polar.yaml \
    --prompt-data tasks.jsonl --input-key task_id \
    --eval-prompt-data held tasks.jsonl --eval-interval 10 --n-samples-per-eval-prompt 1 \
    --rollout-batch-size 16 --n-samples-per-prompt 8 --global-batch-size 128 --num-rollout 200 \
    --advantage-estimator grpo --use-tis --rollout-temperature 1 \
    --hf-checkpoint "$MODEL" --ref-load "$MODEL"_torch_dist --load checkpoints --save checkpoints --save-interval 10 \
    --actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4 --rollout-num-gpus-per-engine 1 \
    --use-dynamic-batch-size --max-tokens-per-gpu 16384 --optimizer adam --lr 1e-6 \
    "${@}"
