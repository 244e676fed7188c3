"""Several "hosts" on one machine: a network namespace each, on one bridge, and a torchrun in each.

    with Hosts(2) as hosts:
        hosts.start(["-m", "stretto", "train", ...], num_ranks=1)
        hosts.cut(1)
        ended = hosts.wait(timeout_s=60)

The disk is shared, as the run folder of several hosts is. The hazard is what torchrun leaves: its workers have
sessions of their own, so whatever lives in a namespace is killed before the namespace goes. Needs root and iproute2.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from bench.namespaces import INTERFACE, Network

__all__ = ["ROOT", "Ended", "Hosts"]

ROOT = Path(__file__).parent.parent
FIRST = "10.77.0.1"
READ_TIMEOUT_S = 10
TCP_RETRIES = "5"
"""How often the kernel sends again before a connection is lost: some 13 s, where its default is 15 minutes."""


@dataclass(frozen=True)
class Ended:
    """How a host's torchrun ended: its exit code, when (`time.monotonic`), and what it and its ranks said."""

    code: int
    at_s: float
    said: str

    @property
    def errors(self) -> list[str]:
        """What ranks of this host gave as the reason of their end, without its prefix."""
        prefix = "stretto: error: "
        return [line.removeprefix(prefix) for line in self.said.splitlines() if line.startswith(prefix)]


class Hosts:
    """`num_hosts` hosts, 10.77.0.1 to 10.77.0.N; the first holds torchrun's store."""

    def __init__(self, num_hosts: int) -> None:
        self._network = Network(num_hosts)
        self._started: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = []
        for name in self._network.ranks:
            subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
            with self._network.inside(name):
                Path("/proc/sys/net/ipv4/tcp_retries2").write_text(TCP_RETRIES)

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, *error: object) -> None:
        for name in self._network.ranks:
            for pid in self.living(name):
                os.kill(pid, signal.SIGKILL)
        for process, file in self._started:
            process.wait()
            file.close()
        self._network.close()

    def start(self, command: Sequence[str], num_ranks: int = 1) -> None:
        """torchrun with `command` on every host, `num_ranks` ranks on each."""
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }
        for index, name in enumerate(self._network.ranks):
            words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(self._network.ranks))]
            words += ["--nproc-per-node", str(num_ranks), "--local-addr", f"10.77.0.{index + 1}"]
            words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{FIRST}:29500", "--rdzv-id", "hosts"]
            words += ["--rdzv-conf", f"is_host={int(index == 0)},read_timeout={READ_TIMEOUT_S}"]
            said = tempfile.TemporaryFile()  # noqa: SIM115
            with self._network.inside(name):
                process = subprocess.Popen(
                    [*words, *command], stdout=said, stderr=subprocess.STDOUT, env=environment, cwd=ROOT
                )
            self._started.append((process, said))

    def cut(self, index: int) -> None:
        """Take the cable of a host out, at the switch: nobody is told."""
        subprocess.run(["ip", "-n", self._network.hub, "link", "set", f"p{index}", "down"], check=True)

    def living(self, name: str) -> list[int]:
        """The processes in a namespace."""
        told = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout
        return [int(pid) for pid in told.split()]

    @property
    def num_living(self) -> int:
        """Processes on all hosts."""
        return sum(len(self.living(name)) for name in self._network.ranks)

    @property
    def has_ended(self) -> bool:
        """Whether a torchrun has ended, which none should before the others."""
        return any(process.poll() is not None for process, _ in self._started)

    def said(self) -> list[str]:
        """What every host said so far."""
        return [os.pread(file.fileno(), 1 << 24, 0).decode(errors="replace") for _, file in self._started]

    def wait(self, timeout_s: float) -> list[Ended]:
        """How every host's torchrun ended; AssertionError where one does not within `timeout_s`."""
        deadline, at_s = time.monotonic() + timeout_s, {}
        while len(at_s) < len(self._started):
            for index, (process, _) in enumerate(self._started):
                if index not in at_s and process.poll() is not None:
                    at_s[index] = time.monotonic()
            assert time.monotonic() < deadline, f"only hosts {sorted(at_s)} ended within {timeout_s} s: {self.said()}"
            time.sleep(0.1)
        codes = [process.returncode for process, _ in self._started]
        return [Ended(code, at_s[index], said) for index, (code, said) in enumerate(zip(codes, self.said()))]
