#!/usr/bin/env bash
# The training text of a retrofit in one command: text that the original model writes, blended with
# plain text. An interrupted call continues where it stopped; OUT/train is the blend.
#   MODEL         directory of the original model
#   OUT           folder to write
#   GSM8K         train.jsonl of openai/grade-school-math
#   INSTRUCTIONS  JSON lines with `prompt` or `messages`
#   BOOKS         folder of .txt, .md, .rst, .tex and .jsonl files
#   WEIGHTS       shares of the four shards, "1 3 2 4" by default
#   NEW_TOKENS    longest continuation, 1024 by default
#   VERIFY        1 keeps only right answers to GSM8K
#   DEVICE        cuda by default; SEQS are the sequences that run together, 256 by default
#   INSTRUCTIONS_SOURCE, INSTRUCTIONS_LICENSE, BOOKS_SOURCE, BOOKS_LICENSE  for the model card
set -euo pipefail
: "${MODEL:?}" "${OUT:?}" "${GSM8K:?}" "${INSTRUCTIONS:?}" "${BOOKS:?}"
read -r -a WEIGHT <<<"${WEIGHTS:-1 3 2 4}"
ANSWERS=()
if [[ ${VERIFY:-0} == 1 ]]; then
  ANSWERS=(--answer-column answer --suffix ' Put the final answer into \boxed{}.')
fi
INSTRUCTIONS_TERMS=(--source "${INSTRUCTIONS_SOURCE:-unknown}" --license "${INSTRUCTIONS_LICENSE:-unknown}")
BOOKS_TERMS=(--source "${BOOKS_SOURCE:-unknown}" --license "${BOOKS_LICENSE:-unknown}")

generate() {
  dms-data generate "$@" --append-eod --model "$MODEL" --device "${DEVICE:-cuda}" \
    --max-num-seqs "${SEQS:-256}" --max-new-tokens "${NEW_TOKENS:-1024}"
}

generate "$GSM8K" --column question --chat --only-finished "${ANSWERS[@]}" --continuations 4 \
  --source openai/grade-school-math --license MIT --output "$OUT/gsm8k"
generate "$INSTRUCTIONS" --chat --continuations 4 \
  "${INSTRUCTIONS_TERMS[@]}" --output "$OUT/instructions"
generate "$BOOKS" --beginning 32-512 --loss-on all "${BOOKS_TERMS[@]}" \
  --output "$OUT/continued"
if [[ -e $OUT/books.manifest.json ]]; then
  echo "$OUT/books: kept; delete $OUT/books.manifest.json to tokenize BOOKS again"
else
  dms-data tokenize "$BOOKS" --passages 8192 --append-eod --tokenizer "$MODEL" \
    "${BOOKS_TERMS[@]}" --output "$OUT/books"
fi
dms-data mix "$OUT/gsm8k=${WEIGHT[0]}" "$OUT/instructions=${WEIGHT[1]}" \
  "$OUT/continued=${WEIGHT[2]}" "$OUT/books=${WEIGHT[3]}" --output "$OUT/train" --overwrite
