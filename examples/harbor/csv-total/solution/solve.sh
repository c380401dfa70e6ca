#!/bin/sh
awk -F';' 'NR > 1 && $4 != "void" {sum += $3} END {printf "%.2f\n", sum}' /app/sales.csv > /app/total.txt
