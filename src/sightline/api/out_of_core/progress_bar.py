"""The progress bar of a long call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ...errors import ParameterError

Progress = bool | Callable[[int, int], Any] | None


@contextmanager
def report_progress(progress: Progress) -> Iterator[Callable[[int, int], Any]]:
    """Yield a function of (finished work items, all work items).

    Parameters
    ----------
    progress : the function itself; True for a progress bar on stderr, None for one if stderr is a terminal
    """
    if callable(progress):
        yield progress
        return
    if not (progress is None or isinstance(progress, bool)):
        raise ParameterError(
            f"progress={progress!r}", "True, False, None or a function (finished, total)", "progress=True"
        )
    if progress is False or (progress is None and not sys.stderr.isatty()):
        yield lambda finished, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("attention"), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda finished, total: bar.update(task, completed=finished, total=total)
