#!/bin/sh
# Seven vLLM engines, on GPUs 1 to 7, whose weights can be changed while they run; GPU 0 is the trainer's.
#
#     sh examples/swe/engines.sh /models/Qwen3.5-4B-text
set -eu
model=${1:?"name the model's folder: sh examples/swe/engines.sh /models/Qwen3.5-4B-text"}
export VLLM_SERVER_DEV_MODE=1
engines=
trap 'trap - INT TERM EXIT; kill $engines 2> /dev/null' INT TERM EXIT
for gpu in 1 2 3 4 5 6 7; do
    CUDA_VISIBLE_DEVICES=$gpu vllm serve "$model" --port "800$gpu" --enable-scale-out --dtype bfloat16 \
        --max-model-len 65536 --enable-prefix-caching > "engine-$gpu.log" 2>&1 &
    engines="$engines $!"
done
wait
