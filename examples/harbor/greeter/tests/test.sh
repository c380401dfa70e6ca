#!/bin/sh
reward=0
if grep -qx "greeting=$EXPECTED_GREETING" /etc/greeter.conf \
    && grep -qx "language=en" /etc/greeter.conf \
    && [ "$(/opt/greeter/greet Ada)" = "$EXPECTED_GREETING, Ada!" ] \
    && [ "$(/opt/greeter/greet "Ole Berg")" = "$EXPECTED_GREETING, Ole Berg!" ]; then
    reward=1
fi
echo "$reward" > /logs/verifier/reward.txt
