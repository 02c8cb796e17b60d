#!/usr/bin/env bash
# Retrofits the embedded model to a compression ratio of 3 and exports it, in about five minutes on
# two CPU cores.
#   OUT    folder of the run (outputs/example)
#   STEPS  factor on the number of steps, such as 0.1
# Arguments are further settings of the run, such as data.global_batch_size=8.
set -euo pipefail
OUT=${OUT:-outputs/example}
STEPS=${STEPS:-1}
steps() { awk -v n="$1" -v f="$STEPS" 'BEGIN { s = int(n * f + 0.5); print (s < 1 ? 1 : s) }'; }

# 1. Text to train on: sheets of linear equations with their solutions, as token files.
dms-data exam-sheets --out "$OUT/data" --sheets 2000 --document-tokens 320 --n-max 2

# 2. What the run will do. This starts nothing.
run=(experiment=demo run.dir="$OUT" "data.paths=[$OUT/data/train]" observe=quiet
  'stage.run=[zero_neuron,retrofit,hold,export]' stage.retrofit.target_cr=3
  stage.zero_neuron.steps="$(steps 6)" stage.retrofit.steps_per_cr="$(steps 42)"
  stage.hold.steps="$(steps 100)" "$@")
dms-plan "${run[@]}"

# 3. The run. The same command again continues an interrupted run.
dms-train "${run[@]}"

# 4. Replay the self-test of the export.
dms-verify "$OUT/exports/final/hf"
