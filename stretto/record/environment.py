"""On what a run was made: versions, devices, threads, commit.

Versions come from the installed packages' metadata, so that nothing heavy is imported; torch alone is, for
its devices. The hazard is a report that says too much: no host name, user, path or environment variable is in
it.
"""

import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

__all__ = ["as_json", "as_text", "environment"]

_PACKAGES = [
    "torch",
    "diffusers",
    "transformers",
    "peft",
    "safetensors",
    "accelerate",
    "scikit-learn",
    "pillow",
    "numpy",
    "tensorboard",
    "tyro",
    "cattrs",
]


def environment() -> dict[str, Any]:
    """The report as plain data; `None` stands for what is not installed or not known."""
    return {
        "stretto": _version("stretto"),
        "commit": _commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "packages": {name: _version(name) for name in _PACKAGES},
        **_torch(),
    }


def as_json(report: dict[str, Any]) -> str:
    """The report as JSON."""
    return json.dumps(report, indent=2) + "\n"


def as_text(report: dict[str, Any]) -> str:
    """The report as aligned lines."""
    flat = {key: value for key, value in report.items() if key != "packages"} | report["packages"]
    width = max(map(len, flat))
    return "\n".join(f"{key:<{width}}  {_shown(value)}" for key, value in flat.items()) + "\n"


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "not there" if value is None else str(value)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch() -> dict[str, Any]:
    """Threads and devices as torch sees them."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return {"torch_fault": f"torch cannot be imported: {error}"}
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "devices": [f"{device.name}, {device.total_memory / 2**30:.0f} GiB" for device in devices],
    }


def _commit() -> str | None:
    """The commit of the source that runs, with a plus where it was changed; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    commit = _git(root, "rev-parse", "HEAD")
    return commit and commit + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")


def _git(root: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu() -> str | None:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or None


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
