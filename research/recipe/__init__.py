"""Recipes of real models: from the download to the report and the model cards."""
