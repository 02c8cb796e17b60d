"""JSON file that makes a folder a checkpoint: position of the run, records of its files.

It is written last, so a folder that has one is complete. It records size and checksum of every
other file, and a checksum of itself.
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

from dms_train.hf import durable
from dms_train.mcore.checkpoints import checksums
from dms_train.mcore.checkpoints.checksums import FileRecord
from dms_train.mcore.errors import CheckpointError, DamagedError
from dms_train.mcore.options import Trainable

STATE_FILE = "run_state.json"
FORMAT = 2  # increased when this version cannot read checkpoints of earlier versions
ADAPTERS = "adapters"  # key of the unmerged adapters, None without any
# Keys of the file itself; the caller provides all others.
_FORMAT, _FILES, _CHECKSUM = "format", "files", "checksum"


def seal(folder: Path, state: dict[str, Any], recorded: dict[str, FileRecord]) -> None:
    """Make `folder` a checkpoint; the last file written."""
    _write(folder, {**state, _FORMAT: FORMAT, _FILES: dict(sorted(recorded.items()))})


def annotate(path: Path, state: dict[str, Any]) -> None:
    """Replace values of a finished checkpoint's JSON state; one rank calls it."""
    _write(path, {**read_state(path), **state})


def _write(folder: Path, state: dict[str, Any]) -> None:
    scratch = folder / f"{STATE_FILE}.partial"
    with scratch.open("w") as file:
        json.dump({**state, _CHECKSUM: _checksum(state)}, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(folder / STATE_FILE)
    durable.sync_folder(folder)


def _checksum(state: dict[str, Any]) -> str:
    values = {key: value for key, value in state.items() if key != _CHECKSUM}
    return f"{zlib.crc32(json.dumps(values, sort_keys=True).encode()):08x}"


def check_replaceable(path: Path) -> None:
    """Refuse a folder that was not written here; FileExistsError."""
    if path.exists() and not (path / STATE_FILE).is_file():
        raise FileExistsError(f"{path}: exists and is not a checkpoint; choose another folder")


def read_state(path: Path) -> dict[str, Any]:
    """Read the JSON state of a checkpoint folder; check that every file is there and whole.

    Only sizes are compared here; `checkpoint.verify` reads the content.

    Raises:
        DamagedError: The folder is absent, incomplete, truncated or cannot be read.
        CheckpointError: A version with another format wrote the checkpoint.
    """
    try:
        return _read_state(path)
    except OSError as error:
        raise unreadable(path, error) from error


def _read_state(path: Path) -> dict[str, Any]:
    state_file = path / STATE_FILE
    if not state_file.is_file():
        raise DamagedError(
            f"checkpoint {path}: no {STATE_FILE}; the folder is missing or was not finished"
        )
    try:
        state = json.loads(state_file.read_text())
        files, written = state[_FILES], state.get(_FORMAT, 1)
        # checkpoints of the first versions have no checksum
        whole = (written != FORMAT and _CHECKSUM not in state) or _checksum(state) == state[
            _CHECKSUM
        ]
        sizes = {n: record["bytes"] for n, record in files.items()} if written == FORMAT else {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise DamagedError(
            f"checkpoint {path}: {STATE_FILE} is damaged ({reason}); use an older checkpoint"
        ) from error
    if not whole:
        raise wrong_content(path, STATE_FILE, "its checksum differs")
    if written != FORMAT:
        newer = isinstance(written, int) and written > FORMAT
        remedy = "install a newer dms-train" if newer else "start the run again in another run.dir"
        raise CheckpointError(
            f"checkpoint {path}: its format is {written}, this version reads {FORMAT}; {remedy}"
        )
    _require_sizes(path, sizes)
    return state


def _require_sizes(path: Path, sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        file = path / name
        actual = file.stat().st_size if file.is_file() else None
        if actual != size:
            difference = "is missing" if actual is None else f"has {actual} bytes instead of {size}"
            raise DamagedError(f"checkpoint {path}: {name} {difference}; use an older checkpoint")


def require_adapters(path: Path, state: dict[str, Any], trainable: Trainable) -> None:
    """Refuse a checkpoint whose adapters are not those that a run trains; CheckpointError."""
    stored = state.get(ADAPTERS)
    if stored == trainable.adapters():
        return
    held = "no adapters" if stored is None else f"adapters of {Trainable.of(stored).overrides()}"
    raise CheckpointError(
        f"checkpoint {path}: it holds {held}, and this run has {trainable.overrides()}; set the "
        "same values, or load a Hugging Face export (exports/NAME/hf, or written by dms-export), "
        "which fits every method.train"
    )


def damaged_files(path: Path, names: list[str] | None = None) -> dict[str, str]:
    """Return the files of a checkpoint, or of `names`, that differ from what was saved, and why."""
    recorded = recorded_files(path)
    return checksums.damaged(path, {n: recorded[n] for n in names or recorded if n in recorded})


def recorded_files(path: Path) -> dict[str, FileRecord]:
    """Return size and checksum of each file at the time of saving."""
    return dict(read_state(path)[_FILES])


def wrong_content(path: Path, name: str, reason: str) -> DamagedError:
    """Make the error for a file whose checksum differs."""
    return DamagedError(
        f"checkpoint {path}: the content of {name} is not what was saved ({reason}); "
        "use an older checkpoint"
    )


def unreadable(path: Path, error: OSError) -> DamagedError:
    """Make the error for a file that the storage cannot read."""
    name = Path(error.filename).name if error.filename else "a file"
    return DamagedError(
        f"checkpoint {path}: {name} cannot be read ({error.strerror or error}); "
        "use an older checkpoint"
    )
