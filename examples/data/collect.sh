#!/bin/sh
# Sessions of examples/tasks to a data set. ENGINE (an address) and KIND name the teacher; without them, written turns do.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
out=${OUT:-data-set}
student=${STUDENT:-$here/../src/polar/engines/scripted/tokenizer}
if [ -z "${ENGINE:-}" ]; then
    export POLAR_ENGINE__KIND=scripted POLAR_ENGINE__OPTIONS="{\"play\": \"$here/plays/right.toml\"}"
    set --
else
    set -- --engine "$ENGINE" --kind "${KIND:-openai}"
fi
mkdir -p "$out"
polar run "$here/tasks" --harness "${HARNESS:-pi}" --data "$out/polar" "$@" \
    --samples 3 --accept 1 --attempts 3 --resume --budget-tokens 50000000
polar export --data "$out/polar" --format sft --best 1 --unique -o "$out/train.jsonl"
polar export --data "$out/polar" --format sft-tokens --tokenizer "$student" --best 1 --unique -o "$out/tokens.jsonl"
rm -rf "$out/huggingface"
polar export --data "$out/polar" --format huggingface --best 1 --unique -o "$out/huggingface"
