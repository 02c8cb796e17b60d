#!/usr/bin/env bash
# One node without a scheduler: `launch/local.sh NPROC OVERRIDE...`, for example
#   launch/local.sh 8 experiment=llama32_1b model.path=MODEL 'data.paths=[data/corpus]'
# SIGTERM to it saves and stops; the same command continues.
set -euo pipefail
if (($# < 1)) || ! [[ $1 =~ ^[1-9][0-9]*$ ]]; then
  sed -n '2,4s/^# //p' "${BASH_SOURCE[0]}" >&2
  exit 2
fi
export NPROC=$1 NNODES=1
shift
exec bash "$(dirname "${BASH_SOURCE[0]}")/node.sh" dms_train "$@"
