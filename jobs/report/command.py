"""`rlhf report`: writes the page, and opens it."""

import webbrowser
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from jobs.report.page import render
from jobs.report.records import read_runs
from rlhf.errors import ConfigError, one_line
from rlhf.tracking.writers import write_atomically

FILE = "report.html"


def write_report(directories: Sequence[Path], out: Path | None = None) -> Path:
    """Writes the report of these runs to ``out``; None: into the run's directory, or into the current one if there are
    several. Raises ConfigError if something is no run, or if the file cannot be written."""
    if out is None:
        out = directories[0] / FILE if len(directories) == 1 else Path.cwd() / FILE
    page = render(read_runs(directories), datetime.now())
    try:
        write_atomically(out, page)
    except OSError as error:
        raise ConfigError(
            f"--out {out}: cannot be written ({one_line(error)}); give a file in a directory of yours"
        ) from error
    return out


def open_in_browser(file: Path) -> bool:
    """Whether a browser has been asked to show it; on a machine without a screen there is none."""
    return webbrowser.open(file.resolve().as_uri())
