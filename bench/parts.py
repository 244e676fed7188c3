"""A long bench run in parts: each joins its cases to those of the file, and its command to theirs.

The hazard is a file whose parts were made on different commits: its commit and date are the last part's.
"""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

from bench.record import write_result

__all__ = ["write_part"]


def write_part(file: Path | None, name: str, figures: dict[str, Any], cases: dict[str, Any], is_part: bool) -> None:
    """Write a bench's figures and cases; where `is_part`, the other cases of the file stay."""
    if file is None:
        return
    command = shlex.join(["python", "-m", f"bench.{name}", *sys.argv[1:]])
    if is_part and file.exists():
        before = json.loads(file.read_text())
        cases = before["cases"] | cases
        if not before["command"].endswith(command):
            command = f"{before['command']}; {command}"
    write_result(file, {"command": command, **figures, "cases": cases})
