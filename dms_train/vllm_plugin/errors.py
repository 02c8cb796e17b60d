"""Errors of the vLLM plugin."""

from __future__ import annotations


class PluginError(RuntimeError):
    """Option or version that the plugin does not support.

    It is no ValueError: pydantic, which calls the hooks of configurations, would wrap its one line.
    """
