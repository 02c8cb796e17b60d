"""A training step beside megatron-core's.

`shapes` lists the cases, `case` and `peer` run one case, `projection` derives the step of a larger
model, and `page` writes docs/performance/training_step.md.
"""
