"""Bad input: the server."""

from __future__ import annotations

import socket

import pytest

from tests.e2e.bad_inputs.cases import Case, check, command, cut
from tests.support.refusals import Workspace


def _port_in_use(workspace: Workspace) -> list[str]:
    listening = workspace.closing.enter_context(socket.create_server(("127.0.0.1", 0)))
    return ["serve", str(workspace.model), "--port", str(listening.getsockname()[1])]


CASES = {
    "serve-missing": Case(
        done="`dms-serve` of a folder that is not there",
        arrange=command("serve", "{workspace.folder}/absent", "--port=0"),
        kind="error",
        facts=("FOLDER/absent",),
    ),
    "serve-cut": Case(
        done="`dms-serve` of a model with cut-off weights",
        arrange=command(
            "serve",
            "{workspace.model}",
            "--port=0",
            damage=lambda workspace: cut(workspace.model / "model.safetensors"),
        ),
        kind="error",
        facts=("MODEL/model.safetensors", "copy"),
    ),
    "serve-empty": Case(
        done="`dms-serve` of a model without weights",
        arrange=command(
            "serve",
            "{workspace.model}",
            "--port=0",
            damage=lambda workspace: (workspace.model / "model.safetensors").unlink(),
        ),
        kind="error",
        facts=("MODEL", "model.safetensors"),
    ),
    "serve-port-in-use": Case(
        done="`dms-serve --port` of a port that another program has",
        arrange=_port_in_use,
        kind="error",
        facts=("127.0.0.1", "in use", "--port"),
    ),
    "serve-host": Case(
        done="`dms-serve --host` of an address that is not this machine's",
        arrange=command("serve", "{workspace.model}", "--host=192.0.2.1"),
        kind="error",
        facts=("192.0.2.1", "--host"),
    ),
    "serve-port": Case(
        done="`dms-serve --port 99999`",
        arrange=command("serve", "{workspace.model}", "--port=99999"),
        kind="error",
        facts=("--port", "99999", "65535"),
    ),
    "serve-seconds": Case(
        done="`dms-serve --request-seconds 0`",
        arrange=command("serve", "{workspace.model}", "--request-seconds=0"),
        kind="error",
        facts=("--request-seconds", "above 0"),
    ),
    "serve-queue": Case(
        done="`dms-serve --max-queue -1`",
        arrange=command("serve", "{workspace.model}", "--max-queue=-1"),
        kind="error",
        facts=("--max-queue", "at least 0"),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_bad_input_is_refused(case: Case, workspace: Workspace) -> None:
    check(case, workspace)
