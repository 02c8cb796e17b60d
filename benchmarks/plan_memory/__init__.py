"""Predictions of `dms-plan` beside measurements."""
