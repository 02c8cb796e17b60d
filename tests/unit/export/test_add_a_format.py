"""One file and a configuration file add an export format; the guide's own two files are tried."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from tests.support import launch

GUIDE = launch.ROOT / "docs" / "guides" / "add_export_format.md"
USE = """
import sys
from pathlib import Path
import torch
from dms_train.cli.config_source import compose
from dms_train.config.ranges import check_ranges
from dms_train.export.writer import write_export
from dms_train.hf.architecture import Architecture
from dms_train.hf.formats import read_format, read_spec, read_target_cr
from dms_train.hf.tensors import expected_shapes
from tests.unit.export.conftest import ARCHITECTURE

config = compose(["experiment=tiny_retrofit", "method=dms_sidecar"])
assert config.stage.export.format == "sidecar", config.stage.export.format
assert not [line for line in check_ranges(config, ARCHITECTURE) if "method" in line]
spec = config.method.spec
out = Path(sys.argv[1])
weights = [(name, torch.zeros(shape)) for name, shape in expected_shapes(ARCHITECTURE).items()]
write_export(
    out,
    architecture=ARCHITECTURE,
    spec=spec,
    cr_factor=None,
    target_cr=3.0,
    dtype=torch.float32,
    export_format="sidecar",
    weights=weights,
    source_dir=None,
    selftest=None,
    provenance={},
)
print(read_format(out), read_spec(out) == spec, read_target_cr(out), (out / "dms.json").is_file())
"""


def fenced(kind: str) -> str:
    """The first block of this kind in the guide."""
    found = re.search(rf"^```{kind}\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def copied_package(folder: Path) -> Path:
    """The package without its links: a place where a file can be added."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(launch.ROOT / "dms_train", folder / "dms_train", ignore=ignored)
    return folder / "dms_train"


def test_the_guides_two_files_add_a_format(tmp_path):
    package = copied_package(tmp_path)
    (package / "hf" / "formats" / "sidecar.py").write_text(fenced("python"))
    (package / "conf" / "method" / "dms_sidecar.yaml").write_text(fenced("yaml"))
    done = launch.python(
        "-c",
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + USE,
        str(tmp_path / "export"),
        PYTHONSAFEPATH="1",
        PYTHONPATH=os.pathsep.join([str(tmp_path), str(launch.ROOT)]),
    )
    assert launch.checked(done).split() == ["sidecar", "True", "3.0", "True"]
