"""Run the files of examples/ and the Python of the documentation, on a model of a few steps."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from dms_train import LLM, SamplingParams
from tests.support import launch
from tests.support.commands import write_commands

EXAMPLES = launch.ROOT / "examples"
SUFFIXES = (".ipynb", ".py", ".sh")
# Fewer samples for a step and an evaluation than the example has.
SMALL = ("data.micro_batch_size=2", "data.global_batch_size=2", "run.eval_samples=2")
PAGES = ("README.md", "docs/quickstart.md", "docs/guides/load_export.md", "docs/concepts/engine.md")
# The pages' model, device and prompt, and what the exported one needs: it has 50 characters.
OTHERWISE = {
    "outputs/demo/hf": "{export}",
    "outputs/cr4/exports/final/hf": "{export}",
    "outputs/lora/exports/final/hf": "{export}",
    ', device="cuda"': "",
    "Once upon a time": "1: Solve",
}


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the export that retrofit.sh writes after four steps."""
    folder = tmp_path_factory.mktemp("examples")
    commands = write_commands(folder / "bin", launch.fork_server())
    path = os.pathsep.join([str(commands), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", str(EXAMPLES / "retrofit.sh"), *SMALL],
        cwd=folder,
        env=launch.environment(PATH=path, OUT="run", STEPS="0.01"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "PASS" in done.stdout  # of the self-test
    return folder / "run" / "exports" / "final" / "hf"


def script(name: str, export: Path) -> subprocess.CompletedProcess[str]:
    return launch.module("tests.support.run_file", str(EXAMPLES / name), str(export))


@pytest.mark.timeout(900)
def test_load_export_solves_the_sheet_with_the_original_and_prints_both_caches(export):
    output = launch.checked(script("load_export.py", export))
    original, retrofitted = output.split(str(export))
    assert "The final answer is 7." in original
    assert "The final answer is -3." in original
    assert "cr_factor 1.00" in original
    assert re.search(r"window 16\)(.|\n)*cr_factor \d+\.\d\d", retrofitted)


@pytest.mark.timeout(900)
def test_stream_prints_growing_texts_and_held_tokens(export):
    output = launch.checked(script("stream.py", export))
    rows = re.findall(r"^ *(\d+) tokens seen, +([\d.]+) held", output, re.MULTILINE)
    seen, held = [int(row[0]) for row in rows], [float(row[1]) for row in rows]
    assert len(rows) > 3
    assert seen == sorted(seen)
    assert all(0 < there <= total for there, total in zip(held, seen, strict=True))


@pytest.mark.timeout(900)
def test_add_policy_holds_its_budget_and_the_tokens_of_an_interval(export):
    output = launch.checked(script("add_policy.py", export))
    (ratio, held) = map(float, re.findall(r"cr_factor ([\d.]+), ([\d.]+) tokens held", output)[0])
    assert 48 <= held < 48 + 16
    assert ratio > 1


# The notebook's parameters for the embedded model, which knows 50 characters.
SHEET = "1: Solve 7*k + 12 = 3*k + 40 for k.\nSolution 1. "
PARAMETERS = {
    "ORIGINAL": str(launch.ROOT / "dms_train" / "assets" / "exam_teacher"),
    "QUESTION": SHEET,
    "FILLER": "7*k = 28. ",
    "FILLERS": 12,
    "NEEDLE": "k = 5. ",
    "NEEDLE_QUESTION": SHEET,
    "MAX_TOKENS": 110,
    "CHAT": False,
}


def test_the_stored_outputs_are_complete_and_say_nothing_of_the_machine() -> None:
    path = EXAMPLES / "smollm2.ipynb"
    assert path.stat().st_size < 300_000
    code = [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [1, 2, 3, 4, 5, 6]
    outputs = [output for cell in code for output in cell.outputs]
    assert all(o.get("name") == "stdout" or "image/png" in o.get("data", {}) for o in outputs)
    assert pictures_of(code) == [0, 0, 0, 0, 1, 1]
    text = "".join(output.get("text", "") for output in outputs)
    assert text.count("--- original") == text.count("--- retrofit") == 2
    assert not re.search(r"(/[\w.-]+){2}|[Ww]arn", text)


@pytest.fixture(scope="module")
def cells(export: Path) -> list[Any]:
    """Return the notebook's code cells with their outputs."""
    notebook = nbformat.read(EXAMPLES / "smollm2.ipynb", as_version=4)
    (first,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    written = set(re.findall(r"^(\w+) =", first.source, re.MULTILINE))
    values = {**PARAMETERS, "RETROFIT": str(export)}
    assert written == set(values)
    first.source = "\n".join(f"{name} = {value!r}" for name, value in values.items())
    NotebookClient(notebook, timeout=600).execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def pictures_of(cells: list[Any]) -> list[int]:
    """Return the number of pictures of each cell."""
    return [sum("image/png" in output.get("data", {}) for output in cell.outputs) for cell in cells]


@pytest.mark.timeout(900)
def test_the_notebook_prints_answers_and_caches_of_both_models(cells: list[Any], export: Path):
    text = "".join(output["text"] for output in cells[2].outputs)
    assert "The final answer is 7." in text.split("--- retrofit")[0]
    greedy = SamplingParams(max_tokens=110, temperature=0, stop=("\n\n",))
    for name, path in (("original", PARAMETERS["ORIGINAL"]), ("retrofit", export)):
        kv = LLM(path).generate(SHEET, greedy)[0].kv
        count = f"{kv.tokens} tokens seen, {kv.live_tokens:.0f} held, {kv.live_bytes:,} bytes"
        assert f"--- {name}: {count}\n" in text


@pytest.mark.timeout(900)
def test_the_notebook_draws_the_cache_and_what_each_head_keeps(cells: list[Any]) -> None:
    assert pictures_of(cells) == [0, 0, 0, 0, 1, 1]


def test_every_script_is_listed_in_the_readme():
    listed = set(re.findall(r"^\| `(\S+)` \|", (EXAMPLES / "README.md").read_text(), re.MULTILINE))
    assert listed == {path.name for path in EXAMPLES.iterdir() if path.suffix in SUFFIXES}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PAGES)
def test_python_of_the_pages_runs(export, page, tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (launch.ROOT / page).read_text(), re.DOTALL)
    assert blocks
    code = "\n".join(blocks)
    for written, here in OTHERWISE.items():
        code = code.replace(written, here.format(export=export))
    (tmp_path / "page.py").write_text(code)
    found = launch.module("tests.support.run_file", str(tmp_path / "page.py"))
    assert launch.checked(found).strip()
