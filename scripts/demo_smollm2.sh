#!/usr/bin/env bash
# The procedure of a retrofit on a real model, on two CPU cores: SmolLM2 135M Instruct takes a few
# steps towards a compression ratio of 2, and answers a question through dms-serve. So few steps
# say nothing about quality; `python -m research recipe smollm2_135m` makes a finished model on a GPU.
#   ORIGINAL  directory of the original (models/smollm2-135m-instruct; fetched with DOWNLOAD=1)
#   EXPORT    a finished export to chat with, if there is one (models/smollm2-135m-instruct-dms)
#   METHOD    overrides of the method (method.channel=36, what `auto` chooses for this model; its
#             ranking takes minutes on a CPU)
#   STEPS     factor on the number of steps
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-outputs/demo_smollm2}
NAME=smollm2-135m-instruct
ORIGINAL=${ORIGINAL:-models/$NAME}
EXPORT=${EXPORT:-models/$NAME-dms}
METHOD=${METHOD:-method.channel=36}
STEPS=${STEPS:-1}
QUESTION=${QUESTION:-Why is the sky blue?}
export TOKENIZERS_PARALLELISM=false
export MALLOC_MMAP_THRESHOLD_=1000000000 MALLOC_TRIM_THRESHOLD_=2000000000

log() { printf '\n== %s\n' "$*"; }
steps() { awk -v n="$1" -v f="$STEPS" 'BEGIN { s = int(n * f + 0.5); print (s < 1 ? 1 : s) }'; }

log "1/4  the model: $ORIGINAL"
if [[ ! -d $ORIGINAL ]]; then
  if [[ $(basename "$ORIGINAL") != "$NAME" ]]; then
    echo "$ORIGINAL: no such folder; correct ORIGINAL" >&2
    exit 2
  fi
  FETCH=()
  if [[ ${DOWNLOAD:-0} == 1 ]]; then FETCH=(--download); fi
  if ! python scripts/fetch_models.py "$NAME" --folder "$(dirname "$ORIGINAL")" "${FETCH[@]}"; then
    if [[ ${#FETCH[@]} == 0 ]]; then echo "this demo: DOWNLOAD=1 make demo MODEL=smollm2" >&2; fi
    exit 2
  fi
fi

rm -rf "$OUT"
mkdir -p "$OUT"
log "2/4  text: the pages of this documentation"
python - "$OUT/pages.jsonl" <<'PYTHON'
import json
import pathlib
import sys

pages = (page.read_text("utf-8") for page in sorted(pathlib.Path("docs").rglob("*.md")))
pathlib.Path(sys.argv[1]).write_text("".join(json.dumps({"text": page}) + "\n" for page in pages))
PYTHON
dms-data tokenize --tokenizer "$ORIGINAL" --append-eod --output "$OUT/data" "$OUT/pages.jsonl"

log "3/4  retrofit towards CR 2: shows the procedure, says nothing about quality"
read -ra CHOSEN <<<"$METHOD"
dms-train experiment=smollm2_135m "${CHOSEN[@]}" "model.path=$ORIGINAL" "data.paths=[$OUT/data]" "run.dir=$OUT" \
  observe=quiet parallel.params_dtype=fp32 data.seq_length=256 data.micro_batch_size=2 \
  data.global_batch_size=2 'stage.run=[zero_neuron,retrofit,hold,export]' \
  stage.hold.branch_ratios=null stage.retrofit.target_cr=2 optim.lr_warmup_steps=2 \
  stage.zero_neuron.steps="$(steps 5)" stage.retrofit.steps_per_cr="$(steps 15)" \
  stage.hold.steps="$(steps 5)" run.save_interval=0 run.eval_samples=4 'data.split="95,5,0"'

CHAT=$OUT/exports/final/hf
if [[ -d $EXPORT ]]; then CHAT=$EXPORT; fi
log "4/4  one question to $CHAT, through dms-serve"
python scripts/ask_served.py "$CHAT" "$QUESTION"

printf '\n%s seconds. Go on:\n' "$SECONDS"
printf '  dms-serve %s        # chat at http://127.0.0.1:8000/\n' "$CHAT"
printf '  python -m research recipe smollm2_135m   # the whole recipe, on a GPU\n'
