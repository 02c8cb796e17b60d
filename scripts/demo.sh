#!/usr/bin/env bash
# The whole recipe on two CPU processes: a toy model is pretrained for about a minute, retrofitted
# to a compression ratio of 2 with tensor parallelism, exported, and loaded with transformers.
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-outputs/demo}
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

say() { printf '\n== %s\n' "$*"; }
train() { torchrun --standalone --nproc-per-node 2 -m dms_train "$@"; }

rm -rf "$OUT"
say "1/5  text: worked solutions of linear equations, with a character tokenizer"
dms-data exam-sheets --out "$OUT/exam_sheets" --sheets 4000 --n-min 1 --n-max 2

say "2/5  pretrain a toy model from scratch, TP 2"
train experiment=tiny_pretrain run.dir="$OUT/pretrain" \
  "data.paths=[$OUT/exam_sheets/train]" model.tokenizer="$OUT/exam_sheets/tokenizer"

say "3/5  retrofit it to CR 2, TP 2: zero the neuron, hand the lane over, anneal, export"
train experiment=tiny_retrofit run.dir="$OUT/retrofit" \
  "data.paths=[$OUT/exam_sheets/train]" model.path="$OUT/pretrain/exports/final/hf"

say "4/5  load the export with transformers and replay its self-test"
dms-verify "$OUT/retrofit/exports/final/hf"

say "5/5  what eviction cost, on held-out text"
dms-compare "$OUT/retrofit/exports/final/hf" --teacher "$OUT/pretrain/exports/final/hf" \
  --data "$OUT/exam_sheets/train" --seq-length 256 --samples 64 \
  --cache-dir "$OUT/data_cache" --json "$OUT/comparison.json"
printf '\nThe retrofitted model is in %s\n' "$OUT/retrofit/exports/final/hf"
