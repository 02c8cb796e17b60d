"""Files that survive a power failure.

A rename may get lost until the file and its folder are synchronised. A file system may also keep
the rename and lose the content of the file. Standard library only.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

# Errors of folders that this user may not open, or that the file system cannot synchronise. Some
# network file systems cannot.
_NOT_FOR_FOLDERS = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES)
_NEW_ABOVE = 2


def sync_file(path: Path) -> None:
    """Wait until the storage has the content of a file."""
    _sync(path, os.O_RDONLY)


def sync_folder(path: Path) -> None:
    """Wait until the storage has the names in a folder, where the file system supports it."""
    try:
        _sync(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        if error.errno not in _NOT_FOR_FOLDERS:
            raise


def sync_tree(folder: Path) -> None:
    """Wait until the storage has all files below a folder."""
    for path in folder.iterdir():
        if path.is_dir():
            sync_tree(path)
        else:
            sync_file(path)
    sync_folder(folder)


def publish(folder: Path, name: Path) -> None:
    """Give a folder with synchronised content its name, which must be unused."""
    os.replace(folder, name)
    # the folders above may be new themselves: RUN, exports and cr4 of RUN/exports/cr4/hf
    for above in (name.parent, *name.parent.parents[:_NEW_ABOVE]):
        sync_folder(above)


def _sync(path: Path, flags: int) -> None:
    number = os.open(path, flags)
    try:
        os.fsync(number)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(number)
