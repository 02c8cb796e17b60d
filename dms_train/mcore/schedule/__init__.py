"""A training step.

`step` runs the pipeline schedule, `graph` replays it as a CUDA graph, `stage_tensor` packs what
stages exchange, `optimizer` applies the gradients.
"""
