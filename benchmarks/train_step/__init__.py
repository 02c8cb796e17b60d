"""Time and memory of a training step beside its peers: `python -m benchmarks.train_step`.

`shapes` lists what is measured, `case` and `peer` run one case, `page` writes
docs/performance/training_step.md.
"""
