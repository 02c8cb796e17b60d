# shellcheck shell=bash
# Settings of NCCL, CUDA, torchrun, the allocator and caches: the only place that exports them.
# Sourced by launch/node.sh. What the caller or the site has set already takes precedence.

# Order of kernels and communication: tensor parallelism overlaps as megatron-core expects.
: "${CUDA_DEVICE_MAX_CONNECTIONS:=1}"
# NVLink SHARP reserves memory on every GPU; set 1 where it was measured to be faster.
: "${NCCL_NVLS_ENABLE:=0}"
# Prints errors only; INFO for one short run when processes cannot meet.
: "${NCCL_DEBUG:=WARN}"
# A collective that hangs leaves a record of what each rank was doing (about 2,000 entries).
: "${TORCH_FR_BUFFER_SIZE:=2000}"
: "${TORCH_NCCL_DUMP_ON_TIMEOUT:=1}"
# NCCL's own watchdog must not take the pause of a long save for a lost process; seconds.
: "${TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC:=1800}"
# How long torchrun lets ranks save after SIGTERM before it kills them (30 s without); seconds.
: "${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:=${SAVE_S:-240}}"
# Fewer holes in GPU memory when activations of different sizes come and go.
: "${PYTORCH_ALLOC_CONF:=expandable_segments:True}"
# torchrun would set 1 and warn; the trainer's work is on the GPU.
: "${OMP_NUM_THREADS:=1}"
# Tokenizers are used in processes that fork.
: "${TOKENIZERS_PARALLELISM:=false}"
# Compiled kernels belong on the node's own disk: a shared file system is slow and locks badly.
: "${TRITON_CACHE_DIR:=${TMPDIR:-/tmp}/dms-triton.$(id -u)}"

export CUDA_DEVICE_MAX_CONNECTIONS NCCL_NVLS_ENABLE NCCL_DEBUG TORCH_FR_BUFFER_SIZE
export TORCH_NCCL_DUMP_ON_TIMEOUT TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC PYTORCH_ALLOC_CONF
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT OMP_NUM_THREADS TOKENIZERS_PARALLELISM TRITON_CACHE_DIR
if [[ -n ${RUN:-} ]]; then
  : "${TORCH_FR_DUMP_TEMP_FILE:=$RUN/errors/nccl_trace_}"
  export TORCH_FR_DUMP_TEMP_FILE
fi
