# The container of docs/guides/cluster.md: torch, CUDA and Triton of the image, everything else as pinned;
# with the extras train and serve, and wandb.
#   docker build -t dms-train .
FROM nvcr.io/nvidia/pytorch:26.02-py3
# The image's own constraints would forbid the versions below.
ENV PIP_CONSTRAINT=
WORKDIR /opt/dms-train
COPY . .
# --no-deps keeps the torch and numpy of the image.
RUN pin() { grep -iE "^($1)==" constraints.txt; } \
 && pip install --no-cache-dir --no-deps $(pin megatron-core) \
 && pip install --no-cache-dir $(pin 'hydra-core|safetensors|tokenizers|transformers|psutil|wandb|rich') \
 && pip install --no-cache-dir $(pin 'starlette|uvicorn|pydantic|prometheus_client|jinja2') \
 && pip install --no-cache-dir --no-deps .
