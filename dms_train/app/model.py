"""The architecture of a configuration: stated in it, or read from a model directory."""

from __future__ import annotations

from pathlib import Path

from dms_train.config.build import ConfigError
from dms_train.hf.architecture import Architecture
from dms_train.hf.config_json import from_hf_config
from dms_train.hf.directory import resolve
from dms_train.hf.gguf_directory import is_gguf, read_gguf_config
from dms_train.hf.json_files import read_config
from dms_train.hf.options import ModelOptions
from dms_train.hf.side_files import refuse_side_files


def read_architecture(model: ModelOptions) -> Architecture:
    """Return `model.architecture`, or the one in `model.path`, with the context of the options.

    Raises:
        ConfigError: Neither is set, or the model is missing or its family is not supported.
    """
    return model.with_context(_stated(model))


def _stated(model: ModelOptions) -> Architecture:
    if model.architecture is not None:
        return model.architecture
    if model.path is None:
        raise ConfigError("model.path, model.architecture: set exactly one")
    try:
        directory = Path(model.path).expanduser()
        if is_gguf(directory):
            return from_hf_config(read_gguf_config(directory))
        if not (directory / "config.json").is_file():
            directory = resolve(
                model.path, revision=model.revision, local_files_only=model.local_files_only
            )
        refuse_side_files(directory)
        return from_hf_config(read_config(directory))
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(f"model.path={model.path}: {error}") from error
