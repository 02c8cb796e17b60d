"""Upload of an export to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from dms_train.hf.json_files import read_json
from dms_train.hf.side_files import ADAPTER_CONFIG, is_adapter
from dms_train.hf.typed import typed


class HubError(ValueError):
    """Error of an upload that cannot be made."""


@typed
def check_upload(repo_id: str) -> None:
    """Refuse an upload before there is anything to upload; makes no network access.

    Args:
        repo_id: `NAME` or `OWNER/NAME`.

    Raises:
        HubError: The name is not valid, there is no token, or the library is offline.
    """
    where = f"--push-to-hub={repo_id}"
    from huggingface_hub import constants, errors, get_token, utils

    try:
        utils.validate_repo_id(repo_id)
    except errors.HFValidationError:
        raise HubError(f"{where}: not the name of a repository; give OWNER/NAME") from None
    if constants.HF_HUB_OFFLINE:
        raise HubError(f"{where}: HF_HUB_OFFLINE forbids the network; unset it")
    if get_token() is None:
        raise HubError(f"{where}: no token for the hub; run `hf auth login` or set HF_TOKEN")


@typed
def push(directory: Path, repo_id: str, *, private: bool) -> str:
    """Create a model repository if there is none and upload a folder to it.

    Args:
        directory: The export.
        repo_id: `NAME` or `OWNER/NAME`.
        private: Whether a repository that is created is private.

    Returns:
        Address of the repository.

    Raises:
        HubError: The export is an adapter of a local model, the hub refused, or it could not be
            reached; one line.
    """
    check_upload(repo_id)
    _refuse_local_base(directory)
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        url = api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(
            folder_path=directory, repo_id=url.repo_id, commit_message="Upload a DMS export"
        )
    except HfHubHTTPError as error:
        status = error.response.status_code
        fix = "use a token that may write there" if status in (401, 403) else "try again later"
        raise HubError(f"{repo_id}: {api.endpoint} answered HTTP {status}; {fix}") from error
    except HfHubHTTPError.__bases__ as error:  # errors of the HTTP library, and OSError
        fix = "check the network and HF_ENDPOINT"
        raise HubError(f"{repo_id}: {api.endpoint} cannot be reached; {fix}") from error
    return str(url)


def _refuse_local_base(directory: Path) -> None:
    """Refuse an adapter whose base model only this machine has."""
    base = read_json(directory / ADAPTER_CONFIG) if is_adapter(directory) else {}
    name = str(base.get("base_model_name_or_path", ""))
    if Path(name).is_absolute():
        raise HubError(
            f"{directory}: its base model {name} is a path on this machine; "
            "train with a hub id as model.path, or upload the merged export"
        )
