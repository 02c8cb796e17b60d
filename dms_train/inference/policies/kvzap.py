"""Eviction by predicted importance: tokens below the threshold leave the window as in DMS."""

from dms_train.inference.policies.dms import POLICY

__all__ = ["POLICY"]
