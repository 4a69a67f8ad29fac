#!/bin/bash
# Islands of one run in several clouds and regions: SkyPilot makes the machines, `diloco launch --on ssh` starts the run.
#   bash islands.sh aws/us-east-1 gcp/europe-west4 lambda
# Run it again at any time: machines that were preempted are made anew, and islands that are not running start again; one
# whose disk was lost fetches the state from the others. At the end: sky down 'diloco-*'
set -euo pipefail
cd "$(dirname "$0")"
places=("$@")
for k in "${!places[@]}"; do
    sky launch --yes --cluster "diloco-$k" --infra "${places[k]}" island.yaml &
done
wait
for k in "${!places[@]}"; do
    echo "diloco-$k address=$(sky status --ip "diloco-$k")" # sky lets ssh find a cluster by its name
done >hosts
diloco launch run.yaml --on ssh --islands "${#places[@]}"
