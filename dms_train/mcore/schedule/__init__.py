"""A training step.

`step` runs the pipeline schedule, `stage_tensor` packs what stages exchange, `optimizer` applies
the gradients.
"""
