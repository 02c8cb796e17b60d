"""Decode steps of cache policies with equal budgets."""
