"""Network namespaces on one machine: one for every rank, all on one bridge, each sending at a set rate.

The bridge has a namespace of its own, so that the machine's own network is never touched; a rank's is left
without loopback, so that what a rank sends can only leave by its shaped interface. The hazard is what a killed
run leaves behind: names carry the process that made them, and those of dead processes go at the next start.
Needs root and iproute2.
"""

import ctypes
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

__all__ = ["HUB_ADDRESS", "INTERFACE", "LinkError", "Network", "remove_leftovers", "unavailable"]

INTERFACE = "eth0"
HUB_ADDRESS = "10.77.0.254"
_MTU = 9000
_FRAME = _MTU + 14
_QUEUE = 1 << 24  # nothing is ever dropped
_TCP = {
    "tcp_congestion_control": "reno",  # bbr, after a change of rate, takes turns in the two directions
    "tcp_slow_start_after_idle": "0",
    "tcp_early_retrans": "0",  # no probe for what is merely waiting
    "tcp_limit_output_bytes": str(1 << 17),
    "tcp_wmem": f"4096 {1 << 23} {1 << 23}",  # a message waits for the link in the kernel, as in a network card
    "tcp_rmem": f"4096 {1 << 23} {1 << 25}",
}
_ROUTE = "rto_min 30s initcwnd 1000"
"""Nothing is lost, only late: at low rates acknowledgements wait behind messages for longer than TCP would wait for
them, and what it sent again, and its window of one frame after that, were part of what was measured. Windows are open
from the first message on. The hazard: a frame that is lost costs 30 s."""
_CLONE_NEWNET = 0x40000000
_MADE_BY = "stretto"
_FOLDER = Path("/run/netns")
_serial = itertools.count()


class LinkError(RuntimeError):
    """The link cannot be made, does not carry what it was set to, or lost a rank; one line."""


def unavailable() -> str:
    """Why this machine cannot emulate a link, in one line; empty where it can."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"emulating a link needs iproute2, and there is no {' and no '.join(missing)}: apt install iproute2"
    if os.geteuid() != 0:
        return f"emulating a link makes network namespaces, which needs root; this is user {os.geteuid()}: use sudo"
    return ""


class Network:
    """Namespaces of `num_ranks` ranks, 10.77.0.1 to 10.77.0.N, and of the bridge, 10.77.0.254."""

    def __init__(self, num_ranks: int) -> None:
        """Make them; `LinkError` says what the machine refused."""
        reason = unavailable()
        if reason:
            raise LinkError(reason)
        remove_leftovers()
        stem = f"{_MADE_BY}-{os.getpid()}-{_started(os.getpid())}-{next(_serial)}"
        self.hub, self.ranks = f"{stem}-hub", [f"{stem}-{rank}" for rank in range(num_ranks)]
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        _batch(["ip"], [f"netns add {name}" for name in (self.hub, *self.ranks)])
        lines = ["link set lo up", "link add br0 type bridge", f"link set br0 mtu {_MTU} addrgenmode none up"]
        lines.append(f"addr add {HUB_ADDRESS}/24 dev br0")
        for rank, name in enumerate(self.ranks):
            lines.append(f"link add p{rank} mtu {_MTU} type veth peer name {INTERFACE} mtu {_MTU} netns {name}")
            lines.append(f"link set p{rank} master br0 addrgenmode none up")
        _batch(["ip", "-n", self.hub], lines)
        for rank, name in enumerate(self.ranks):
            with self.inside(name):
                for setting, value in _TCP.items():
                    (Path("/proc/sys/net/ipv4") / setting).write_text(value)
            address = f"addr add 10.77.0.{rank + 1}/24 dev {INTERFACE}"
            route = f"route change 10.77.0.0/24 dev {INTERFACE} src 10.77.0.{rank + 1} {_ROUTE}"
            _batch(["ip", "-n", name], [f"link set {INTERFACE} addrgenmode none up", address, route])

    def shape(self, bits_per_s: float, burst_bytes: int) -> int:
        """Let every rank send at `bits_per_s`, at most `burst_bytes` (or one frame) at once; the burst set."""
        burst, rate = max(burst_bytes, _FRAME), round(bits_per_s)
        for name in self.ranks:
            line = f"qdisc replace dev {INTERFACE} root tbf rate {rate}bit burst {burst} limit {_QUEUE}"
            _batch(["tc", "-n", name], [line])
        return burst

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """This thread, and the sockets and processes it makes meanwhile, are in a namespace."""
        with open("/proc/thread-self/ns/net") as home, open(_FOLDER / name) as there:
            _enter(there.fileno())
            try:
                yield
            finally:
                _enter(home.fileno())

    def close(self) -> None:
        """Remove the namespaces; what still runs in one keeps it alive, without its name."""
        for name in (self.hub, *self.ranks):
            _remove(name)


def remove_leftovers() -> list[str]:
    """Remove the namespaces of runs whose process is gone; their names."""
    found = []
    for path in _FOLDER.glob(f"{_MADE_BY}-*-*-*"):
        _, pid, started, *_ = path.name.split("-")
        if _started(int(pid)) != started:
            _remove(path.name)
            found.append(path.name)
    return found


def _started(pid: int) -> str:
    """When a process began, in clock ticks since boot: tells it from a later one of the same number."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _enter(file: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(file, _CLONE_NEWNET):
        raise LinkError(f"entering a network namespace failed: {os.strerror(ctypes.get_errno())}")


def _remove(name: str) -> None:
    if (_FOLDER / name).exists():
        subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def _batch(command: Sequence[str], lines: Sequence[str]) -> None:
    told = "".join(f"{line}\n" for line in lines)
    done = subprocess.run([*command, "-batch", "-"], input=told, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LinkError(f"{' '.join(command)} refused: {' '.join(done.stderr.split())}")
