"""The documentation site: what its pages may load."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _hooks():
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "scripts" / "docs_hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "tag",
    [
        '<script src="https://example.org/a.js"></script>',
        '<link rel="stylesheet" href="//example.org/a.css">',
        '<img alt="" src="http://example.org/a.png"/>',
    ],
)
def test_the_build_fails_on_a_page_that_loads_from_another_host(tmp_path, tag):
    (tmp_path / "index.html").write_text(f"<html><body>{tag}</body></html>")
    with pytest.raises(Exception, match=r"index\.html loads .*example\.org/a"):
        _hooks().on_post_build({"site_dir": str(tmp_path)})


def test_the_build_fails_on_a_style_sheet_that_loads_from_another_host(tmp_path):
    (tmp_path / "a.css").write_text("body { background: url(https://example.org/a.png) }")
    with pytest.raises(Exception, match=r"a\.css"):
        _hooks().on_post_build({"site_dir": str(tmp_path)})


def test_links_to_other_hosts_and_files_of_the_site_are_allowed(tmp_path):
    (tmp_path / "index.html").write_text(
        '<a href="https://example.org">paper</a><script src="assets/a.js"></script>'
    )
    _hooks().on_post_build({"site_dir": str(tmp_path)})
