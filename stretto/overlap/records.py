"""What every kind of call did on a group: how it communicated, how often, what stayed exposed.

A library that silently does not overlap is worse than none: whatever was asked for and does not happen is said once,
as an `OverlapWarning` of a group's first rank, and stands in every rank's report. The hazard:
seconds exposed are those in which the host was blocked; on CUDA the host is not, and only a trace knows.
"""

import warnings
from collections.abc import Hashable
from dataclasses import dataclass, field

import torch.distributed as dist

__all__ = ["OverlapWarning", "Record", "Records", "Report"]


class OverlapWarning(UserWarning):
    """Overlap was asked for and does not happen."""


@dataclass
class Record:
    """What calls of one operation, shape and schedule did together."""

    operation: str
    tuned_as: str
    schedule: str
    num_subslices: int
    num_calls: int = 0
    exposed_s: float = 0.0
    """Seconds, of all calls, in which the host waited for messages."""
    predicted_s: float | None = None
    """Seconds of one call by the law, where it was measured."""
    predicted_exposed_s: float | None = None
    why: str = ""
    """Why it communicates as it does, where that is not what was asked for."""


@dataclass(frozen=True)
class Report:
    """The records of one group, in the order in which they were begun."""

    records: list[Record]
    said: list[str]
    """What was asked for on this group and does not happen, or is not looked at; each once."""

    def __str__(self) -> str:
        head = ("operation", "tuned as", "schedule", "m", "calls", "exposed ms a call", "predicted ms exposed", "why")
        rows = [head, *(_row(record) for record in self.records)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        table = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows]
        return "\n".join(table + self.said)


def _row(record: Record) -> tuple[str, ...]:
    exposed = record.exposed_s / max(1, record.num_calls) * 1e3
    predicted = "-" if record.predicted_exposed_s is None else f"{record.predicted_exposed_s * 1e3:.3f}"
    schedule, m = record.schedule, str(record.num_subslices)
    return (
        record.operation,
        record.tuned_as,
        schedule,
        m,
        str(record.num_calls),
        f"{exposed:.3f}",
        predicted,
        record.why,
    )


@dataclass
class Records:
    """The records of a group as they grow."""

    records: dict[Hashable, Record] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)

    def of(self, operation: str, tuned_as: str, facts: Hashable, schedule: str, num_subslices: int) -> Record:
        """The record of a kind of call, begun if it is the first."""
        key = (operation, tuned_as, facts, schedule, num_subslices)
        if key not in self.records:
            self.records[key] = Record(operation, tuned_as, schedule, num_subslices)
        return self.records[key]

    def report(self) -> Report:
        """As it stands now."""
        return Report(list(self.records.values()), list(self.said))

    def say_once(self, group: dist.ProcessGroup, reason: str) -> None:
        """Warn of one reason, which all ranks have, once for this group: its first rank says it."""
        if self.note(reason) and dist.get_rank(group) == 0:
            name = group.group_desc or group.group_name
            warnings.warn(f"group {name!r}: {reason}", OverlapWarning, stacklevel=2)

    def note(self, reason: str) -> bool:
        """Put it below the report, without a warning; whether it was not there."""
        is_new = reason not in self.said
        if is_new:
            self.said.append(reason)
        return is_new
