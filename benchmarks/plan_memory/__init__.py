"""Predictions of `dms-plan` beside measurements: `python -m benchmarks.plan_memory`."""
