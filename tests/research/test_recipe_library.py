"""Python's standard library as text to train on."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import pytest

from research.recipe import library

SKIPPED = ("test", "tests", "idlelib", "encodings", "ensurepip", "site-packages", "dist-packages")
LONG = '"""A module."""\n' + "value = 1\n" * 30


def written(folder: Path) -> Path:
    """Write a library below a folder whose own name would be left out inside it."""
    root = folder / "tests" / "python3"
    for name, text in {
        "b.py": f"# b é\n{LONG}",
        "a/z.py": f"# z\n{LONG}",
        "a/__init__.py": "from a.z import value\n",
        "c.py": "#" * 199,
        "d.py": "#" * 200,
        **{f"a/{name}/module.py": LONG for name in SKIPPED},
        "notes.txt": LONG,
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


def test_each_long_module_is_a_document(tmp_path: Path) -> None:
    out = tmp_path / "made" / "code.jsonl"
    assert library.main([str(out), "--folder", str(written(tmp_path))]) == 0
    rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert rows == [{"text": text} for text in (f"# z\n{LONG}", f"# b é\n{LONG}", "#" * 200)]


def test_the_library_of_this_python_is_the_default(tmp_path: Path) -> None:
    out = tmp_path / "code.jsonl"
    assert library.main([str(out)]) == 0
    texts = {json.loads(line)["text"] for line in out.read_text("utf-8").splitlines()}
    own = Path(sysconfig.get_path("stdlib"))
    for name in ("argparse.py", "json/decoder.py"):
        assert (own / name).read_text("utf-8") in texts
    assert not [text for text in texts if len(text) < 200]


def test_a_folder_without_modules_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "code.jsonl"
    assert library.main([str(out), "--folder", str(tmp_path / "none")]) == 2
    assert "none: no modules of Python; name the folder" in capsys.readouterr().err
    assert not out.exists()


def test_a_module_in_another_encoding_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "latin.py").write_bytes(b"# \xe9" + b"#" * 300)
    assert library.main([str(tmp_path / "code.jsonl"), "--folder", str(tmp_path)]) == 2
    assert "latin.py: not UTF-8; name the folder" in capsys.readouterr().err
