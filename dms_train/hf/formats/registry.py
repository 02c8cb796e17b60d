"""Registry of the export formats, and reading in the format that matches."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import Any

from dms_train.hf.errors import HFError
from dms_train.hf.formats.base import ExportedModel, ExportFormat, ExportRefused, Stated
from dms_train.hf.formats.nested import nested_format
from dms_train.hf.json_files import read_config, read_json
from dms_train.hf.typed import typed
from dms_train.hf.values import Values
from dms_train.method.base import MethodSpec
from dms_train.method.spec import OPTIONS
from dms_train.version import __version__

MARKER_FILE = "export.json"  # written into every export
DENSE = "dense"  # format of an export without a method
_NOT_FORMATS = ("base", "flat", "nested", "registry")


def _found() -> dict[str, ExportFormat]:
    names = (module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))
    formats = {method: nested_format(method) for method in OPTIONS}
    for name in names:
        if name not in _NOT_FORMATS:
            formats[name] = importlib.import_module(f"{__package__}.{name}").FORMAT
    return dict(sorted(formats.items()))


FORMATS: dict[str, ExportFormat] = _found()
"""Formats by name, in alphabetical order."""


@typed
def format_of_preset(preset: str, method: str) -> str:
    """Return the export format of a preset, by default the one named after its method.

    Args:
        preset: Preset of the method.
        method: Name of the method.
    """
    return next((name for name, candidate in FORMATS.items() if candidate.preset == preset), method)


@typed
def default_format(spec: MethodSpec) -> str:
    """Return the format of the spec's preset."""
    return format_of_preset(spec.preset, spec.kind)


@typed
def find_format(name: str) -> ExportFormat:
    """Return a format by name.

    Raises:
        ExportRefused: No format has that name; the message lists the known ones.
    """
    if name not in FORMATS:
        raise ExportRefused(f"export format {name!r}: choose one of {', '.join(FORMATS)}")
    return FORMATS[name]


@typed
def check_export(name: str, model: ExportedModel) -> list[str]:
    """Check that the consumer of a format computes what was trained.

    Args:
        name: The format.
        model: Model to be exported.

    Returns:
        Remarks about an acceptable export, one line each.

    Raises:
        ExportRefused: The first reason why the weights would be misread.
    """
    export_format = find_format(name)
    if not model.target_cr >= 1:
        raise ExportRefused(f"compression ratio {model.target_cr}: a factor of at least 1")
    problem = export_format.problem(model)
    if problem is None and export_format.method != model.spec.kind:
        problem = (
            f"method={model.spec.preset}: it holds models trained for {export_format.method} only"
        )
    if problem:
        raise ExportRefused(
            f"export format {name} ({export_format.consumer}): {problem}; "
            f"or export in format {model.spec.kind}, which every spec of the method fits"
        )
    return export_format.advice(model)


@typed
def read_provenance(directory: Path) -> dict[str, Any]:
    """Read what an export records about the origin of its weights; empty if it records nothing."""
    marker = directory / MARKER_FILE
    stated = read_json(marker).get("provenance") if marker.is_file() else None
    return dict(stated) if isinstance(stated, dict) else {}


@typed
def require_known_format(directory: Path) -> None:
    """Refuse an export in a format that this version lacks; it would count as a dense model.

    Raises:
        HFError: The message names the version to install.
    """
    if not (directory / MARKER_FILE).is_file():
        return
    marker = Values(f"{directory}: {MARKER_FILE}", read_json(directory / MARKER_FILE))
    name = marker.values.get("export_format", DENSE)
    if name != DENSE and name not in FORMATS:
        writer = str(marker.block("provenance").block("versions").values.get("dms-train"))
        is_known = writer[:1].isdigit()  # not in a source tree
        needed = f"dms-train {writer} or newer" if is_known else "a newer dms-train"
        raise HFError(
            f"{directory}: export format {name!r} is unknown to dms-train {__version__}; "
            f"install {needed}"
        )


@typed
def read_stated(
    directory: str | Path, *, decision_projection: bool = False
) -> tuple[str, Stated] | None:
    """Read what a retrofitted model states, with its format; None for a dense model.

    Args:
        directory: The export.
        decision_projection: Whether the caller supports a decision projection, whose spec has no
            meaningful channel.

    Raises:
        FileNotFoundError: If there is no config.json.
        HFError: If the keys are incomplete, contradictory or of a variant not supported, or a newer
            version wrote the export in a format of its own.
    """
    directory = Path(directory)
    require_known_format(directory)
    config = read_config(directory)
    for name, export_format in FORMATS.items():
        stated = export_format.read(directory, config, decision_projection)
        if stated is not None:
            return name, stated
    return None


@typed
def read_spec(directory: str | Path, *, decision_projection: bool = False) -> MethodSpec | None:
    """Read the specification of a model, None for a dense one; errors as `read_stated`."""
    stated = read_stated(directory, decision_projection=decision_projection)
    return None if stated is None else stated[1].spec


@typed
def read_format(directory: str | Path) -> str | None:
    """Return the format of a model, or None for a dense one; errors as `read_stated`."""
    stated = read_stated(directory)
    return None if stated is None else stated[0]


@typed
def read_target_cr(directory: str | Path) -> float:
    """Read the compression ratio that an export was trained for; 1 for a dense model."""
    stated = read_stated(directory)
    return 1.0 if stated is None else stated[1].target_cr
