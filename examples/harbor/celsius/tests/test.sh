#!/bin/sh
# The folder of this script holds readings that nobody has seen, and what must come out.
here=$(dirname "$0")
reward=0
if [ -x /srv/tools/celsius.sh ] \
    && /srv/tools/celsius.sh < "$here/readings.txt" > /tmp/celsius.out \
    && cmp /tmp/celsius.out "$here/celsius.txt" \
    && [ "$STATION" = north ] && [ -s /srv/readings/all.log ]; then
    reward=1
fi
printf '{"reward": %s}\n' "$reward" > /logs/verifier/reward.json
