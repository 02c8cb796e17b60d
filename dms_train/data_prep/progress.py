"""A progress bar on terminals where rich is installed; elsewhere there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int, str], None]


@contextmanager
def progress_bar(total: int | None) -> Iterator[Advance]:
    """Show a bar on stderr while the block runs.

    Args:
        total: Amount of work that fills the bar; None if unknown.

    Yields:
        A function of the amount of work just finished and a text to show.
    """
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        yield lambda amount, text: None
        return
    columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    console = Console(stderr=True)
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task("", total=total)
        yield lambda amount, text: progress.update(task, advance=amount, description=text)
