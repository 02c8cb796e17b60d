"""The scripts of examples/ and the Python of the documentation, on a model of a few steps."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.support import launch
from tests.support.commands import write_commands

EXAMPLES = launch.ROOT / "examples"
PAGES = ("README.md", "docs/quickstart.md", "docs/guides/load_export.md", "docs/concepts/engine.md")
# The pages' model, device and prompt, and what the exported one needs: it has 50 characters.
OTHERWISE = {
    "outputs/demo/hf": "{export}",
    "outputs/cr4/exports/final/hf": "{export}",
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
        ["bash", str(EXAMPLES / "retrofit.sh")],
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


def test_every_script_is_listed_in_the_readme():
    listed = set(re.findall(r"^\| `(\S+)` \|", (EXAMPLES / "README.md").read_text(), re.MULTILINE))
    assert listed == {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh")}


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
