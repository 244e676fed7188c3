"""Prompt files: one prompt a line, or JSON lines whose other keys are handed to the rewards.

The whole file is checked before the first step, and every bad line named. The hazard is a fault that strikes an
hour in: a line without the key that a reward reads. Two equal prompts stay two; a prompt is known by its index.
Imports no torch.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Prompts", "looked_for", "read_prompts"]


@dataclass(frozen=True)
class Prompts:
    """P prompts, and the other keys of their lines as columns of P values each."""

    texts: list[str]
    metadata: dict[str, list[Any]] = field(default_factory=dict)


def read_prompts(path: Path) -> Prompts:
    """Read a .jsonl file of objects with "prompt", or any other file as one prompt a line; blank lines are skipped.

    Raises ValueError that names every bad line (the first ten), and for a file that is missing, a folder, empty or
    not UTF-8 (a byte order mark may open it).
    """
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f'prompts.file = "{path}": there is no such file{looked_for(path)}') from None
    except IsADirectoryError:
        raise ValueError(f'prompts.file = "{path}" is a folder: name a text file with one prompt a line') from None
    except UnicodeDecodeError as error:
        raise ValueError(f'prompts.file = "{path}": byte {error.start} is not UTF-8') from None
    numbered = [(number, line.strip()) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise ValueError(f'prompts.file = "{path}" is empty: write one prompt a line')
    if path.suffix != ".jsonl":
        return Prompts([line for _, line in numbered])
    return _from_json_lines(path, numbered)


def looked_for(path: Path) -> str:
    """Of a relative path, which is of the current directory, where it led: " (looked for /...)"."""
    return "" if path.is_absolute() else f" (looked for {path.absolute()})"


def _from_json_lines(path: Path, numbered: list[tuple[int, str]]) -> Prompts:
    rows: list[dict[str, Any]] = []
    faults: list[str] = []
    for number, line in numbered:
        try:
            rows.append(_row(line, rows[0].keys() if rows else None))
        except ValueError as fault:
            faults.append(f"line {number}: {fault}")
    if faults:
        more = [f"and {len(faults) - 10} more lines"] if len(faults) > 10 else []
        raise ValueError(f'prompts.file = "{path}": ' + "; ".join(faults[:10] + more))
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    return Prompts(columns.pop("prompt"), columns)


def _row(line: str, keys: Any) -> dict[str, Any]:
    """One line's object; `keys` are those of the first, which all lines must have."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(row, dict) or "prompt" not in row:
        raise ValueError('an object with "prompt" is wanted')
    if not isinstance(row["prompt"], str) or not row["prompt"].strip():
        raise ValueError(f'"prompt" is {json.dumps(row["prompt"])}; text is wanted')
    if keys is not None and row.keys() != keys:
        odd = ", ".join(sorted(row.keys() ^ keys))
        raise ValueError(f"its keys differ from the first line's in: {odd}")
    return row
