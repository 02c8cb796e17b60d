"""Uploads by the real huggingface_hub, to a server on this machine."""

from __future__ import annotations

import json

import pytest

from tests.support import launch
from tests.support.hub_server import hub_server

pytest.importorskip("huggingface_hub")
TOKEN = "hf_a_token_of_this_test"
PUSH = """
import sys
from pathlib import Path
from dms_train.app.failures import message
from dms_train.export.hub import HubError, push
try:
    print(push(Path(sys.argv[1]), sys.argv[2], private=True))
except HubError as error:
    sys.stderr.write(message(error))
    sys.exit(2)
"""


def upload(directory, tmp_path, repo_id="someone/x", **environment):
    """A process of its own: the library reads its settings when it is imported."""
    settings = {
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_TOKEN": TOKEN,
        "NO_PROXY": "127.0.0.1",
        **environment,
    }
    return launch.python("-c", PUSH, str(directory), repo_id, **settings)


def test_every_file_of_the_export_arrives(export, tmp_path):
    directory = export()
    with hub_server(TOKEN) as hub:
        printed = launch.checked(upload(directory, tmp_path, HF_ENDPOINT=hub.endpoint))
    assert printed.strip() == f"{hub.endpoint}/someone/x"
    (made,) = hub.created
    assert made["name"] == "x"
    # the wording depends on the release of huggingface_hub
    assert made.get("private") is True or made.get("visibility") == "private"
    sent = {
        str(file.relative_to(directory)): file.read_bytes()
        for file in directory.rglob("*")
        if file.is_file()
    }
    assert {"README.md", "config.json", "model.safetensors"} <= set(sent)
    assert hub.files == sent


@pytest.mark.parametrize(
    ("repo_id", "environment", "named"),
    [
        ("a/b/c", {}, ("a/b/c", "OWNER/NAME")),
        ("someone/x", {"HF_TOKEN": ""}, ("someone/x", "HF_TOKEN")),
        ("someone/x", {"HF_HUB_OFFLINE": "1"}, ("someone/x", "HF_HUB_OFFLINE")),
        ("someone/x", {"HF_ENDPOINT": "http://127.0.0.1:9"}, ("127.0.0.1:9", "HF_ENDPOINT")),
    ],
    ids=["name", "no token", "offline", "no network"],
)
def test_what_cannot_be_uploaded_is_refused_on_one_line(tmp_path, repo_id, environment, named):
    (tmp_path / "config.json").write_text("{}")
    done = upload(tmp_path, tmp_path, repo_id, **environment)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 2
    assert all(word in last for word in named)
    assert "Traceback" not in done.stderr


def test_an_adapter_of_a_local_model_is_refused_on_one_line(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "adapter").mkdir()
    for base, refused in (("/models/base", True), ("someone/base", False)):
        config = json.dumps({"base_model_name_or_path": base})
        (tmp_path / "adapter" / "adapter_config.json").write_text(config)
        with hub_server(TOKEN) as hub:
            done = upload(tmp_path, tmp_path, HF_ENDPOINT=hub.endpoint)
        assert done.returncode == (2 if refused else 0)
        assert bool(hub.created) != refused
        assert ("/models/base is a path" in done.stderr) == refused
        assert "Traceback" not in done.stderr


def test_a_token_without_rights_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with hub_server("hf_another_token") as hub:
        done = upload(tmp_path, tmp_path, HF_ENDPOINT=hub.endpoint)
    assert done.returncode == 2
    assert "HTTP 401" in done.stderr
    assert "token" in done.stderr
    assert hub.files == {}


def test_an_export_makes_no_network_access_by_default(tmp_path):
    """`dms-export` refuses an upload that cannot be made before it reads the checkpoint."""
    command = ["dms_train.checkpoints_tools.megatron_to_hf", "absent", "out"]
    offline = launch.module(*command, "--push-to-hub=someone/x", HF_HUB_OFFLINE="1")
    without_upload = launch.module(*command, HF_HUB_OFFLINE="1")
    assert offline.returncode == without_upload.returncode == 2
    assert "HF_HUB_OFFLINE" in offline.stderr
    assert "absent" in without_upload.stderr
    assert "HF_HUB_OFFLINE" not in without_upload.stderr
