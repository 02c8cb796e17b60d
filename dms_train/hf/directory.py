"""Model directories of Hugging Face: where they are, and the architecture that they state."""

from __future__ import annotations

from pathlib import Path

from dms_train.hf.architecture import Architecture
from dms_train.hf.config_json import from_hf_config
from dms_train.hf.errors import HFError
from dms_train.hf.formats.registry import require_known_format
from dms_train.hf.gguf_directory import cached_gguf, is_gguf
from dms_train.hf.json_files import read_config
from dms_train.hf.text_files import refuse_pointer
from dms_train.hf.typed import typed

# README.md is the model card: an export states the licence that it names.
_FILES_OF_INTEREST = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "README.md"]
# Folders of gpt-oss: the same weights for other programs. The patterns above match in all folders.
_OTHER_FORMS = ["original/*", "metal/*"]


@typed
def resolve(
    path_or_id: str | Path, *, revision: str | None = None, local_files_only: bool = True
) -> Path:
    """Find a model directory.

    Args:
        path_or_id: A directory, which takes precedence, a GGUF file, or a hub id such as
            `Qwen/Qwen3-0.6B`.
        revision: Hub revision; ignored for directories and files.
        local_files_only: Look only into the local hub cache, never at the network.

    Returns:
        The directory; for a GGUF file the one that `cached_gguf` converts it to.

    Raises:
        FileNotFoundError: One line that names what is absent and what to do.
        HFError: An argument has another type, the name is empty, or the path is a file that is
            not GGUF or not supported.
    """
    if not str(path_or_id):
        raise HFError("path_or_id='': give a directory, a GGUF file or a hub id")
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        return path
    if is_gguf(path):
        return cached_gguf(path)
    if path.is_file():
        with path.open("rb") as file:
            refuse_pointer(path, file.read(64))
        raise HFError(f"{path}: a file, but not a GGUF file; give a model directory")
    name = str(path_or_id)
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise FileNotFoundError(f"{name}: no such directory; correct the path")
    try:
        from huggingface_hub import snapshot_download

        snapshot = snapshot_download(
            name,
            revision=revision,
            local_files_only=local_files_only,
            allow_patterns=_FILES_OF_INTEREST,
            ignore_patterns=_OTHER_FORMS,
        )
    except (ImportError, OSError, ValueError) as error:
        where = "the local hub cache" if local_files_only else "the hub"
        fix = "give a directory, or allow the network with local_files_only=false"
        raise FileNotFoundError(
            f"{name}: neither a directory nor in {where} (revision {revision or 'main'}); {fix}"
        ) from error
    return Path(snapshot)


@typed
def read_architecture(directory: str | Path) -> Architecture:
    """Read the architecture in `config.json`; HFError naming the directory if not supported."""
    require_known_format(Path(directory))
    try:
        return from_hf_config(read_config(directory))
    except HFError as error:
        where = "" if str(directory) in str(error) else f"{directory}: "
        raise HFError(f"{where}{error}") from None
