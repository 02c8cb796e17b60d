"""Exports of the `ablation_*` experiments, evaluated: `python -m benchmarks.ablations`."""
