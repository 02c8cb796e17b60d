"""Bad input: data."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.bad_inputs.cases import (
    VALIDATED,
    Case,
    check,
    command,
    cut,
    damaged,
    edit_json,
    flip,
    train,
)
from tests.support import refusals
from tests.support.refusals import Workspace, run_alone, run_here


def _other_tokenizer(workspace: Workspace) -> None:
    edit_json(workspace.model / "tokenizer.json", padding=None, version="1.1")


def _smaller_vocabulary(workspace: Workspace) -> None:
    shutil.rmtree(workspace.model)
    refusals.write_model(workspace.model, workspace.folder, vocab_size=40)


def _short_data(workspace: Workspace) -> None:
    words = ["data", "tokenize", str(_text(workspace, "short.txt", b"1 + 2")), "--overwrite"]
    assert (
        run_here(
            [*words, "--output", str(workspace.data), "--tokenizer", str(workspace.model)]
        ).code
        == 0
    )


def _lines(line: bytes) -> Callable[[Workspace], None]:
    """Data whose documents are this line, very often."""

    def write(workspace: Workspace) -> None:
        text = _text(workspace, "lines.txt", line * 2000)
        words = ["data", "tokenize", str(text), "--document-per-line", "--overwrite"]
        words += ["--output", str(workspace.data), "--tokenizer", str(workspace.model)]
        assert run_here(words).code == 0

    return write


def _problems(workspace: Workspace, *lines: str) -> None:
    (workspace.folder / "problems.jsonl").write_text("".join(f"{line}\n" for line in lines))


def _without_tokenizer(workspace: Workspace) -> None:
    _problems(workspace, '{"prompt": "So 1", "answers": ["1"]}')
    (workspace.model / "tokenizer.json").unlink()


def _text(workspace: Workspace, name: str, content: bytes) -> Path:
    path = workspace.folder / name
    path.write_bytes(content)
    return path


def _tokenize(
    name: str,
    content: bytes | None,
    *flags: str,
    damage: Callable[[Workspace], object] | None = None,
) -> Callable[[Workspace], list[str]]:
    def arrange(workspace: Workspace) -> list[str]:
        if content is not None:
            _text(workspace, name, content)
        if damage is not None:
            damage(workspace)
        words = ["data", "tokenize", str(workspace.folder / name), "--output", str(workspace.out)]
        words += ["--tokenizer", str(workspace.model), *flags]
        return [word.format(workspace=workspace) for word in words]

    return arrange


def _openr1(source: str, *flags: str, template: bool = True) -> Callable[[Workspace], list[str]]:
    def arrange(workspace: Workspace) -> list[str]:
        _text(workspace, "rows.jsonl", b'{"problem": "1", "generations": ["2"]}\n')
        words = ["data", "openr1", source, "--output", "{workspace.out}"]
        words += ["--tokenizer", "{workspace.model}", *flags]
        if template:
            file = _text(workspace, "template.jinja", b"{{ messages[0]['content'] }}")
            words += ["--chat-template", str(file)]
        return [word.format(workspace=workspace) for word in words]

    return arrange


def _generate(workspace: Workspace) -> list[str]:
    rows = _text(workspace, "rows.jsonl", b'{"text": "1"}\n')
    words = ["data", "generate", str(rows), "--model", str(workspace.model)]
    return [*words, "--max-new-tokens", "4", "--output", str(workspace.out)]


CASES = {
    "manifest-missing": Case(
        done="`PREFIX.manifest.json` deleted",
        arrange=damaged(lambda workspace: Path(f"{workspace.data}.manifest.json").unlink()),
        kind="error",
        facts=("DATA.manifest.json", "dms-data tokenize", "data.paths", "make"),
    ),
    "data-with-extension": Case(
        done="`data.paths=[PREFIX.bin]`",
        arrange=damaged(lambda workspace: None, "data.paths=[{workspace.data}.bin]"),
        kind="error",
        facts=("name",),
    ),
    "manifest-broken": Case(
        done="`PREFIX.manifest.json` cut off",
        arrange=damaged(lambda workspace: cut(Path(f"{workspace.data}.manifest.json"))),
        kind="error",
        facts=("DATA.manifest.json", "JSON"),
    ),
    "bin-cut": Case(
        done="`PREFIX.bin` cut off",
        arrange=damaged(lambda workspace: cut(Path(f"{workspace.data}.bin"))),
        kind="error",
        facts=("DATA.bin",),
    ),
    "bin-flipped": Case(
        done="one bit of `PREFIX.bin` flipped",
        arrange=damaged(lambda workspace: flip(Path(f"{workspace.data}.bin"), 99)),
        kind="config error",
        facts=("data.paths", "DATA.bin", "SHA", "256", "copy it or tokenise"),
        runner=run_alone,
        changes=("run", "run/config.yaml", "run/state", "run/state/*"),
    ),
    "idx-damaged": Case(
        done="a length in `PREFIX.idx` changed",
        arrange=damaged(lambda workspace: flip(Path(f"{workspace.data}.idx"), 40)),
        kind="error",
        facts=("DATA.idx", "tokens", "manifest"),
    ),
    "idx-flipped": Case(
        done="one bit of `PREFIX.idx` flipped",
        arrange=damaged(lambda workspace: flip(Path(f"{workspace.data}.idx"), -1)),
        kind="config error",
        facts=("data.paths", "DATA.idx", "SHA", "256", "copy it or tokenise"),
        runner=run_alone,
        changes=("run", "run/config.yaml", "run/state", "run/state/*"),
    ),
    "other-tokenizer": Case(
        done="data made with another tokenizer than the model's",
        arrange=damaged(_other_tokenizer),
        kind="error",
        facts=("sheets.jsonl", "tokenizer"),
    ),
    "token-ids": Case(
        done="token ids outside the model's vocabulary",
        arrange=damaged(_smaller_vocabulary),
        kind="error",
        facts=("49", "40"),
        lines=2,  # a warning that the data's tokenizer is not checked
    ),
    "data-too-small": Case(
        done="less data than one sample",
        arrange=damaged(_short_data),
        kind="error",
        facts=("DATA", "5", "1", "33", "data.split", "data.seq_length"),
    ),
    "no-validation-share": Case(
        done="`data.split='100,0,0'`",
        arrange=train("data.split='100,0,0'"),
        kind="error",
        facts=("data.split", "data.seq_length", "run.eval_samples=0", "use"),
    ),
    "packed-window": Case(
        done="`data.packing=true` with documents that are shorter than the window",
        arrange=damaged(_lines(b"1 + 2\n"), "data.packing=true", "method.window=16"),
        kind="config error",
        facts=("method.window=16", "4", "data.packing=true", "use"),
    ),
    "packed-tokens": Case(
        done="`data.packing=true` with documents of a single token",
        arrange=damaged(_lines(b"1\n"), "data.packing=true"),
        kind="error",
        facts=("DATA", "single token", "data.packing=false", "use"),
    ),
    "json-line": Case(
        done="a malformed line in a `.jsonl` file",
        arrange=_tokenize("rows.jsonl", b'{"text": "1"}\n{"text": \n'),
        kind="",
        facts=("dms-data", "FOLDER/rows.jsonl", "2", "JSON"),
    ),
    "json-field": Case(
        done="a `.jsonl` line without the text field",
        arrange=_tokenize("rows.jsonl", b'{"body": "1"}\n'),
        kind="",
        facts=("rows.jsonl", "1", "--text-key", "name"),
    ),
    "not-utf8": Case(
        done="a text file that is not UTF-8",
        arrange=_tokenize("page.txt", b"1\n\xff\n"),
        kind="",
        facts=("page.txt", "2", "UTF", "8"),
    ),
    "empty-input": Case(
        done="an empty input file",
        arrange=_tokenize("page.txt", b""),
        kind="",
        facts=("dms-data", "page.txt"),
    ),
    "input-missing": Case(
        done="an input file that is not there",
        arrange=_tokenize("page.txt", None),
        kind="",
        facts=("FOLDER/page.txt",),
    ),
    "input-type": Case(
        done="an input of unknown type",
        arrange=_tokenize("page.pdf", b"1"),
        kind="",
        facts=("page.pdf", "give"),
    ),
    "tokenizer-missing": Case(
        done="`--tokenizer` of a folder without `tokenizer.json`",
        arrange=_tokenize(
            "page.txt", b"1", damage=lambda workspace: (workspace.model / "tokenizer.json").unlink()
        ),
        kind="",
        facts=("MODEL", "tokenizer.json", "give"),
    ),
    "output-exists": Case(
        done="`--output` of a shard that exists",
        arrange=_tokenize("page.txt", b"1", "--output", "{workspace.data}"),
        kind="",
        facts=("DATA", "--overwrite", "pass"),
    ),
    "output-unwritable": Case(
        done="`--output` below a file",
        arrange=_tokenize("page.txt", b"1", "--output", "{workspace.data}.bin/shard"),
        kind="",
        facts=("DATA.bin", "/shard", "choose"),
        runner=run_alone,
    ),
    "bin-damaged": Case(
        done="`dms-data check` of a shard with a flipped bit",
        arrange=command(
            "data",
            "check",
            "{workspace.data}",
            damage=lambda workspace: flip(Path(f"{workspace.data}.bin"), 99),
        ),
        kind="",
        facts=("DATA.bin", "SHA", "256"),
    ),
    "openr1-columns": Case(
        done="`dms-data openr1` of rows without a column",
        arrange=_openr1("{workspace.folder}/rows.jsonl"),
        kind="",
        facts=("FOLDER/rows.jsonl", "row 0", "no column", "answer", "OpenR1-Math-220k"),
    ),
    "openr1-template": Case(
        done="`dms-data openr1` for a tokenizer without a chat template",
        arrange=_openr1("{workspace.folder}/rows.jsonl", template=False),
        kind="",
        facts=("MODEL", "no chat template", "--chat-template"),
    ),
    "openr1-not-cached": Case(
        done="`dms-data openr1` of a hub id that is not in the local cache",
        arrange=_openr1("nobody/nothing"),
        kind="",
        facts=("nobody/nothing", "cache", "--allow-network"),
    ),
    "generate-columns": Case(
        done="`dms-data generate` of rows without a prompt",
        arrange=_generate,
        kind="",
        facts=("FOLDER/rows.jsonl", "row 0", "prompt or messages", "--column"),
    ),
    "problems-missing": Case(
        done="`stage.validate_export.problems` of a file that is not there",
        arrange=damaged(
            lambda workspace: None,
            *VALIDATED,
            "stage.validate_export.problems={workspace.folder}/problems.jsonl",
        ),
        kind="error",
        facts=("FOLDER/problems.jsonl",),
    ),
    "problems-broken": Case(
        done="a malformed line in `stage.validate_export.problems`",
        arrange=damaged(
            lambda workspace: _problems(workspace, '{"prompt": "So 1", "answers": ["1"]}', "{"),
            *VALIDATED,
            "stage.validate_export.problems={workspace.folder}/problems.jsonl",
        ),
        kind="error",
        facts=("FOLDER/problems.jsonl", "2", "JSON"),
    ),
    "problems-answers": Case(
        done="a line of `stage.validate_export.problems` whose answers are numbers",
        arrange=damaged(
            lambda workspace: _problems(workspace, '{"prompt": "So 1", "answers": [1]}'),
            *VALIDATED,
            "stage.validate_export.problems={workspace.folder}/problems.jsonl",
        ),
        kind="error",
        facts=("FOLDER/problems.jsonl", "1"),
    ),
    "problems-long": Case(
        done="a problem longer than the model's positions",
        arrange=damaged(
            lambda workspace: _problems(
                workspace, json.dumps({"prompt": "1" * 128, "answers": ["1"]})
            ),
            *VALIDATED,
            "stage.validate_export.problems={workspace.folder}/problems.jsonl",
        ),
        kind="error",
        facts=("128",),
    ),
    "problems-tokenizer": Case(
        done="problems for a model without a tokenizer",
        arrange=damaged(
            _without_tokenizer,
            *VALIDATED,
            "stage.validate_export.problems={workspace.folder}/problems.jsonl",
        ),
        kind="error",
        facts=("MODEL", "tokenizer.json"),
        lines=2,  # a warning that exports take token ids only
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_bad_input_is_refused(case: Case, workspace: Workspace) -> None:
    check(case, workspace)
