#!/usr/bin/env bash
# What every node runs: `node.sh MODULE ARGUMENT...` starts the module in NPROC ranks under torchrun,
# or in one plain process with NPROC=0. Under SLURM launch/job.sh sets what is needed; without it, the
# same command on every node:
#   NNODES=2 NPROC=8 MASTER_ADDR=first-node RUN=/shared/run launch/node.sh dms_train OVERRIDE...
# Environment: NPROC, NNODES, MASTER_ADDR, MASTER_PORT, RENDEZVOUS (the same on all nodes, new for
# every start), NODE_NAME (as others resolve it), RUN (folder of the run), PYTHON, CODE; NODE_GPUS,
# CHECKPOINT_BYTES and KEPT_BYTES, what the node is checked for before the start.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=dms_train/launch/env.sh
source "$here/env.sh"
PYTHON=${PYTHON:-python3}
# The code that this script belongs to, whatever the current folder holds.
code=$(dirname "$(dirname "$here")")
export PYTHONPATH=${CODE:-$code}${PYTHONPATH:+:$PYTHONPATH} PYTHONSAFEPATH=1

# SIGUSR1 goes to every process of a job step. It would end torchrun and leave its ranks behind, so
# torchrun ignores it; the trainer sets a handler of its own.
trap "" USR1
if [[ -n ${NODE_GPUS:-} && -n ${RUN:-} ]]; then
  "$PYTHON" -m dms_train.launch.preflight --gpus "$NODE_GPUS" \
    --checkpoint-bytes "${CHECKPOINT_BYTES:-0}" --kept-bytes "${KEPT_BYTES:-0}" \
    --node "${NODE_NAME:-$(hostname -s)}" --rank $((${SLURM_NODEID:-0} * ${NPROC:-1})) \
    ${CUDA_VISIBLE_DEVICES+"--visible=$CUDA_VISIBLE_DEVICES"} "$RUN"
fi
if [[ ${NPROC:-1} == 0 ]]; then
  exec "$PYTHON" -m "$@"
fi

if [[ -n ${RUN:-} ]]; then
  export DMS_ATTEMPT=${DMS_ATTEMPT:-0}
  mkdir -p "$RUN/errors"
  # What torchrun itself reports, such as a rank that was killed.
  export TORCHELASTIC_ERROR_FILE="$RUN/errors/$DMS_ATTEMPT-node${SLURM_NODEID:-$(hostname -s)}.json"
fi
arguments=(--nproc-per-node="${NPROC:-1}" --max-restarts=0)
if [[ ${NNODES:-1} == 1 ]]; then
  arguments+=(--standalone)
else
  # Ranks are ordered by this address, so the node's name puts them in the order of the nodes.
  arguments+=(--nnodes="$NNODES" --rdzv-backend=c10d
    --rdzv-endpoint="$MASTER_ADDR:${MASTER_PORT:-29500}" --rdzv-id="${RENDEZVOUS:-dms}"
    --local-addr="${NODE_NAME:-$(hostname)}")
fi
exec "$PYTHON" -m torch.distributed.run "${arguments[@]}" -m "$@"
