#!/usr/bin/env bash
# The batch shell of a job: `job.sh MODULE ARGUMENT...` runs the module on the job's nodes,
# passes signals on, watches the heartbeat and decides by the state files what happens next.
# Environment, set by slurm/*.sbatch: RUN, STAGE, CODE, WORKDIR, PYTHON, NPROC (ranks per node, 0 for
# one plain process), NODE_GPUS, CHECKPOINT_BYTES and KEPT_BYTES (what a node must have),
# MAX_FAILURES, HANG_S (0: no watchdog), SAVE_S, SRUN_OPTIONS (one per line).
set -uo pipefail # no -e: exit codes are read here, not fatal
state=$RUN/state
failures=$state/$STAGE.failures
mkdir -p "$state" "$RUN/errors"
log() { echo "== $(date -u +%FT%TZ) $STAGE: $*"; }
newest() { find "$RUN/checkpoints" -maxdepth 1 -name 'step_????????' 2>/dev/null | sort | tail -n 1; }
slurm_reports() { scontrol show job -o "$SLURM_JOB_ID" | grep -q "$1"; }
cancelled() { [[ -e $state/CANCELLED ]] || slurm_reports 'JobState=CANCELLED'; }
preempted() { slurm_reports 'PreemptTime=[0-9]'; }
rc=1
give_up() {
  echo "$1" >"$state/$STAGE.FAILED"
  log "$1"
  exit "$rc"
}

if [[ -e $state/$STAGE.done ]]; then
  log "finished before; nothing to do"
  exit 0
fi
cd "$WORKDIR" || give_up "gave up: $WORKDIR, where it was submitted, is not on $(hostname -s)"
rm -f "$state/STOPPED" "$state/REFUSED" "$state/$STAGE.FAILED" "$state"/node*.up
touch "$state/heartbeat"
before=$(newest)
attempt=${SLURM_RESTART_COUNT:-0}
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
NNODES=$SLURM_NNODES
RENDEZVOUS=$SLURM_JOB_ID.$attempt
DMS_ATTEMPT=$SLURM_JOB_ID.$attempt
export RUN CODE PYTHON NPROC SAVE_S NNODES MASTER_ADDR MASTER_PORT RENDEZVOUS DMS_ATTEMPT
log "job $SLURM_JOB_ID, attempt $attempt, nodes $SLURM_JOB_NODELIST"

# srun can wait for ever for a node that failed and came back, so the request is followed by SIGKILL.
end_step() {
  log "$1: ending the step"
  scancel "$SLURM_JOB_ID.0"
  sleep 10
  kill -9 "$step" 2>/dev/null
}
# The signal before the time limit reaches this shell only; every process of the step gets it from
# here, once all nodes have reported that they ignore it until the ranks listen; it would end them before.
# It is sent again until the step ends, since a rank that was still starting has not received it. A step
# that has not saved and ended after SAVE_S seconds is ended.
received='' step='' helpers=()
stop_step() {
  local since=$SECONDS
  while kill -0 "$step" 2>/dev/null; do
    ((SECONDS - since >= SAVE_S)) && { end_step "no clean stop in $SAVE_S s"; return; }
    (($(find "$state" -name 'node*.up' | wc -l) == NNODES)) &&
      scancel --signal=USR1 "$SLURM_JOB_ID.0" 2>/dev/null
    sleep 2
  done
}
# shellcheck disable=SC2317 # called by the traps
on_signal() {
  [[ -n $received ]] && return
  received=$1
  log "signal $1: asking the step to save and stop"
  [[ -n $step ]] && { stop_step & helpers+=($!); }
}
trap 'on_signal USR1' USR1
trap 'on_signal TERM' TERM

mapfile -t options < <(printf '%s' "${SRUN_OPTIONS:-}")
# shellcheck disable=SC2016 # the node's own variables
srun --kill-on-bad-exit=1 --export=ALL "${options[@]}" \
  bash -c 'trap "" USR1; touch "$RUN/state/node$SLURM_NODEID.up"; export NODE_NAME=$SLURMD_NODENAME
    exec bash "$CODE/dms_train/launch/node.sh" "$@"' node "$@" &
step=$!
[[ -n $received && ${#helpers[@]} == 0 ]] && { stop_step & helpers+=($!); }
if ((HANG_S > 0)); then
  while sleep 5 && kill -0 "$step" 2>/dev/null; do
    beat=$(stat -c %Y "$state/heartbeat" 2>/dev/null) || continue
    age=$(($(date +%s) - beat))
    ((age > HANG_S)) && { end_step "no heartbeat for $age s"; break; }
  done &
  helpers+=($!)
fi
# `wait` also returns for a trapped signal
while :; do
  wait "$step"
  rc=$?
  kill -0 "$step" 2>/dev/null || break
done
kill "${helpers[@]}" 2>/dev/null

if [[ -e $state/$STAGE.done ]]; then
  rm -f "$failures"
  log "finished"
  exit 0
fi
((rc)) || rc=1
if cancelled; then
  log "cancelled"
  exit "$rc"
fi
if [[ -e $state/REFUSED ]]; then
  give_up "refused: $(cat "$state/REFUSED")"
elif [[ -e $state/STOPPED ]]; then
  reason="stopped and saved, $(cat "$state/STOPPED")"
elif [[ $(newest) != "$before" ]]; then
  echo 0 >"$failures"
  reason="failed after $(basename "$(newest)")"
elif preempted; then
  reason="preempted before it could save"
else
  count=$(($(cat "$failures" 2>/dev/null || echo 0) + 1))
  echo "$count" >"$failures"
  if ((count > MAX_FAILURES)); then
    give_up "gave up after $count failure(s) without progress, exit code $rc"
  fi
  reason="failure $count of at most $MAX_FAILURES without progress, exit code $rc"
fi
log "requeued: $reason"
trap - TERM
scontrol requeue "$SLURM_JOB_ID" ||
  give_up "$reason; it could not be requeued, so dms-submit resume ${RUN@Q} must go on"
sleep 60 # SLURM ends this shell; it must not end by itself before
exit "$rc"
