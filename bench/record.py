"""What every bench writes: its figures with the machine, the date, the commit and the command that made them."""

import datetime
import json
import sys

from stretto.record.atomic import write_atomic
from stretto.record.environment import environment

__all__ = ["write_result"]


def write_result(path, figures):
    """Write `figures` as JSON to `path`, or nothing where no path was asked for."""
    if path is None:
        return
    command = " ".join(["python -m", sys.modules["__main__"].__spec__.name, *sys.argv[1:]])
    report = {
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": environment(),
        **figures,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(report, indent=1) + "\n")
    print(f"written to {path}")
