"""Predictions of `dms-plan` compared with measurements."""
