"""Predicted importance: a scorer on a frozen model, a threshold, and a window."""
