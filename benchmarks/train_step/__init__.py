"""A training step of this project and of megatron-core.

`shapes` lists the cases, `case` and `peer` run one case, `projection` derives the step of a larger
model, and `page` writes docs/performance/training_step.md.
"""
