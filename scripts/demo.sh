#!/usr/bin/env bash
# The whole recipe in one process on two CPU cores: the embedded teacher is retrofitted to a
# compression ratio of 4, exported, and evaluated on the compact cache.
#   METHOD  dms (default), dms_nvidia, dms_fastdms, dmc, dmc_c or dmc_hardc
#   CR      compression ratio, 4 by default
#   STEPS   factor on the number of steps: 0.5 for a slow machine, 2 for a better model
#   SEED    of the training, 1234 by default
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-outputs/demo}
METHOD=${METHOD:-dms}
CR=${CR:-4}
STEPS=${STEPS:-1}
SEED=${SEED:-1234}
export TOKENIZERS_PARALLELISM=false
# Large buffers are kept instead of being returned and mapped again in every step: a tenth faster.
export MALLOC_MMAP_THRESHOLD_=1000000000 MALLOC_TRIM_THRESHOLD_=2000000000

log() { printf '\n== %s\n' "$*"; }
steps() { awk -v n="$1" -v f="$STEPS" 'BEGIN { s = int(n * f + 0.5); print (s < 1 ? 1 : s) }'; }

METHOD_VALUES=()
# DMC has no window, and a format of its own
if [[ $METHOD == dmc* ]]; then METHOD_VALUES=(method.window=0 stage.export.format=dmc); fi

rm -rf "$OUT"
log "1/2  exam sheets to train on, and problems that no sheet holds"
dms-data exam-sheets --out "$OUT/data" --sheets 3300 --document-tokens 320 --n-max 2
dms-data exam-problems --out "$OUT/data/problems.jsonl" --sheets 200 --n 2

log "2/2  retrofit to CR $CR, export, validate_export: $(steps 6) zeroing steps instead of the paper's 2,000," \
  "$(steps 42) a CR unit instead of 100, $(steps 130) of cool-down"
dms-train experiment=demo "method=$METHOD" "${METHOD_VALUES[@]}" run.dir="$OUT" "run.seed=$SEED" "data.paths=[$OUT/data/train]" \
  stage.validate_export.problems="$OUT/data/problems.jsonl" stage.validate_export.window_only=true \
  stage.zero_neuron.steps="$(steps 6)" stage.retrofit.steps_per_cr="$(steps 42)" \
  stage.hold.steps="$(steps 130)" stage.retrofit.target_cr="$CR"

ln -sfn exports/final/hf "$OUT/hf"
printf '\n%s seconds. The model is in %s/hf, the report in %s/report.md\n' "$SECONDS" "$OUT" "$OUT"
printf 'dms-serve %s/hf serves it, and shows at http://127.0.0.1:8000/ which tokens it evicts.\n' "$OUT"
