"""Export formats: layout, limits of the program that reads it, and reading back.

Every method has a format of its name (`nested`). Formats for other programs are modules with one
`FORMAT`, named after it; `registry` finds them, so one file adds a format. `base` holds the
description, `flat` the layout that two formats share. Nothing here needs torch or transformers.
"""

from dms_train.hf.formats.base import (
    AdapterBase,
    ExportedModel,
    ExportFormat,
    ExportRefused,
    Stated,
)
from dms_train.hf.formats.registry import (
    FORMATS,
    check_export,
    default_format,
    find_format,
    format_of_preset,
    read_format,
    read_provenance,
    read_spec,
    read_stated,
    read_target_cr,
)

__all__ = [
    "FORMATS",
    "AdapterBase",
    "ExportFormat",
    "ExportRefused",
    "ExportedModel",
    "Stated",
    "check_export",
    "default_format",
    "find_format",
    "format_of_preset",
    "read_format",
    "read_provenance",
    "read_spec",
    "read_stated",
    "read_target_cr",
]
