#!/bin/sh
# 45.00 + 2.50 + 39.90 + 120.50
if [ "$(cat /app/total.txt)" = "207.90" ]; then
    echo 1 > /logs/verifier/reward.txt
else
    echo 0 > /logs/verifier/reward.txt
fi
