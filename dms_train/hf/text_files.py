"""Text files that users hand over: UTF-8, with one clear error for anything else."""

from __future__ import annotations

from pathlib import Path

from dms_train import git_lfs
from dms_train.hf.errors import HFError

_UTF_16 = (b"\xff\xfe", b"\xfe\xff")


def refuse_pointer(path: str | Path, data: bytes) -> None:
    """Refuse the start of a file that Git LFS has left out: HFError with the fix."""
    refusal = git_lfs.refusal(data)
    if refusal is not None:
        raise HFError(f"{path}: {refusal}")


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file without its byte-order mark; line ends become newlines.

    Raises:
        HFError: The file is not UTF-8; names the line.
        OSError: The file cannot be read.
    """
    return decode_text(str(path), path.read_bytes()).replace("\r\n", "\n").replace("\r", "\n")


def read_lines(path: Path) -> list[tuple[str, str]]:
    """Return each line that is not blank, preceded by its file and line number.

    Lines end at line feeds and carriage returns alone. `str.splitlines` would also split at
    separators such as U+2028, which JSON strings and prompts may hold.

    Raises:
        HFError: The file is not UTF-8; names the line.
        OSError: The file cannot be read.
    """
    lines = enumerate(read_text(path).split("\n"), 1)
    return [(f"{path}:{number}", line) for number, line in lines if line.strip()]


def decode_text(name: str, data: bytes, first_line: int = 1) -> str:
    """Return the text of bytes in UTF-8, without a byte-order mark at the start of a file.

    Args:
        name: Name of the file, for messages.
        data: Consecutive lines of the file.
        first_line: Number of the first of these lines.

    Raises:
        HFError: The bytes are not UTF-8, or hold NUL bytes (ASCII text in UTF-16 does), or are a
            Git LFS pointer.
    """
    if first_line == 1:
        refuse_pointer(name, data)
    if first_line == 1 and data.startswith(_UTF_16):
        raise HFError(f"{name}: UTF-16 text; save the file as UTF-8")
    try:
        text = data.decode("utf-8-sig" if first_line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        raise HFError(
            f"{name}:{line}: not UTF-8 ({error.reason}); save the file as UTF-8"
        ) from None
    nul = text.find("\0")
    if nul >= 0:
        line = first_line + text.count("\n", 0, nul)
        raise HFError(f"{name}:{line}: a NUL byte, which text has none of; save the file as UTF-8")
    return text
