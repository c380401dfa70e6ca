#!/bin/sh
# The folder of this script holds readings that nobody has seen, and what must come out. Both are gone before the
# agent's script runs: what must come out is not there to be copied.
here=$(dirname "$0")
readings=$(cat "$here/readings.txt") expected=$(cat "$here/celsius.txt")
rm -f "$here/readings.txt" "$here/celsius.txt"
reward=0
if [ -x /srv/tools/celsius.sh ] \
    && printed=$(printf '%s\n' "$readings" | /srv/tools/celsius.sh) \
    && [ "$printed" = "$expected" ] \
    && [ "$STATION" = north ] && [ -s /srv/readings/all.log ]; then
    reward=1
fi
printf '{"reward": %s}\n' "$reward" > /logs/verifier/reward.json
