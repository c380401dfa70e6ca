#!/bin/sh
# Usage: backup.sh SOURCE TARGET
set -e
source=$1
target=$2
mkdir $target
cd $source
count=0
for file in $(ls *.txt); do
    cp $file $target
    count=$((count + 1))
done
echo $count
