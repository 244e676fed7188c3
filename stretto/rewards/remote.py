"""A reward that lives elsewhere: its name is an address, and one POST a batch asks it.

`http://host:port/path` sends float32; `http://host:port/path#uint8` a quarter of the bytes (the part after # is never
sent). What goes over the wire is in `stretto.rewards.wire`, a server in `stretto.rewards.serve`. So a scorer whose
packages conflict with these runs in an environment of its own, or on a machine of its own. Whoever may be well at
another attempt raises ServiceError; asking again is `stretto.rewards.retries`.

The hazard is waiting: a socket's own timeout is of one read, and a service that sends a byte now and then outlives it
for ever. Here one deadline is over the whole attempt, from connecting to the last byte. (Looking up the host's name
is the system's, not under it.) Proxies of the environment are not used.
"""

import contextlib
import http.client
import io
import json
import math
import re
import socket
import time
from typing import Any
from urllib.parse import urlsplit

from torch import Tensor

from stretto.rewards.failures import RefusedError, ServiceError
from stretto.rewards.wire import pack

__all__ = ["RemoteReward"]

_AGAIN = frozenset({408, 425, 429})
"""Answers below 500 that ask for patience."""
_ROOM = (1 << 20, 1 << 12)
"""Bytes an answer may have: so many, and so many a sample."""


class RemoteReward:
    """The reward at `address`: `reward(media, prompts, **metadata)` returns B finite floats.

    timeout_s bounds one attempt in all, a slow upload too. Nothing is connected before the first call.

    Raises:
        ValueError: an address that is none, in one line.
    """

    def __init__(self, address: str, timeout_s: float = 60.0) -> None:
        self.address, self.timeout_s = address, timeout_s
        self.host, self.port, self._path, self.as_uint8 = _parsed(address)

    def within(self, timeout_s: float) -> "RemoteReward":
        """The same reward with another bound."""
        return RemoteReward(self.address, timeout_s)

    def __repr__(self) -> str:
        return f"RemoteReward({self.address!r})"

    def __call__(self, media: Tensor, prompts: list[str], **metadata: Any) -> list[float]:
        """Ask once.

        Args:
            media: (B, C, H, W) or (B, F, C, H, W) in [0, 1], any device. prompts: B texts. metadata: JSON.

        Raises:
            ServiceError: no connection, no whole answer in time, 5xx (and 408, 425, 429), or a 200 that is not B
            finite numbers. RefusedError: any other status. ValueError: metadata that is not JSON.
        """
        body = pack(media, prompts, metadata, as_uint8=self.as_uint8)
        status, reason, answer = self._post(body, _ROOM[0] + _ROOM[1] * len(prompts))
        if status != 200:
            told, row = _complaint(answer, len(prompts))
            problem = f"answered {status} {reason}".rstrip() + (f": {told}" if told else "")
            if status >= 500 or status in _AGAIN:
                raise ServiceError(problem)
            raise RefusedError(problem, row)
        return _rewards(answer, len(prompts))

    def _post(self, body: bytes, room: int) -> tuple[int, str, bytes]:
        deadline = time.monotonic() + self.timeout_s
        host = f"[{self.host}]" if ":" in self.host else self.host
        head = (
            f"POST {self._path} HTTP/1.1\r\nHost: {host}:{self.port}\r\nContent-Type: application/octet-stream\r\n"
            f"Accept: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        try:
            with socket.create_connection((self.host, self.port), self.timeout_s) as connection:
                wire = _Wire(connection, deadline)
                # A service that refuses a body before it has read it all closes on us; its answer is still there.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    wire.send(head.encode("ascii"))
                    wire.send(body)
                return _answer(wire, room)
        except TimeoutError:
            raise ServiceError(f"gave no whole answer within {self.timeout_s:g} s") from None
        except ConnectionRefusedError:
            raise ServiceError("refused the connection") from None
        except (OSError, http.client.HTTPException) as error:
            told = " ".join(f"{type(error).__name__}: {error}".split())
            raise ServiceError(f"broke the connection ({told[:200]})") from error


class _Wire(io.RawIOBase):
    """A connection under one deadline; TimeoutError past it. What http.client reads an answer from."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection, self._deadline = connection, deadline

    def send(self, data: bytes) -> None:
        self._arm()
        self._connection.sendall(data)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._arm()
        return self._connection.recv_into(buffer)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def _arm(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)


def _answer(wire: Any, room: int) -> tuple[int, str, bytes]:
    response = http.client.HTTPResponse(wire, method="POST")
    try:
        response.begin()
        content = response.read(room + 1)
        if len(content) > room:
            raise ServiceError(f"answered more than {room} bytes")
        if response.length:
            raise ServiceError(f"broke off with {response.length} bytes of its answer missing")
        return response.status, " ".join(response.reason.split())[:100], content
    finally:
        response.close()


def _rewards(answer: bytes, num_samples: int) -> list[float]:
    """B finite floats out of a 200 answer, or ServiceError."""
    content = _json(answer)
    if not isinstance(content, dict) or not isinstance(content.get("rewards"), list):
        raise ServiceError(f'answered {_shown(answer)}, not {{"rewards": [...]}}')
    rewards = content["rewards"]
    if len(rewards) != num_samples:
        raise ServiceError(f"answered {len(rewards)} rewards for {num_samples} samples")
    for row, value in enumerate(rewards):
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
            raise ServiceError(f"answered {_shown(repr(value).encode())} as reward {row} of {num_samples}: no number")
    return [float(value) for value in rewards]


def _complaint(answer: bytes, num_samples: int) -> tuple[str, int | None]:
    """What a refusal says, on one line, and the row it says it of."""
    content = _json(answer)
    if not isinstance(content, dict):
        return (_shown(answer) if answer.strip() else ""), None
    row = content.get("row")
    is_row = isinstance(row, int) and not isinstance(row, bool) and 0 <= row < num_samples
    return " ".join(str(content.get("error", "")).split())[:300], row if is_row else None


def _json(answer: bytes) -> Any:
    try:
        return json.loads(answer)
    except (ValueError, RecursionError):
        return None


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def _shown(data: bytes) -> str:
    text = repr(" ".join(data[:200].decode("utf-8", "replace").split()))
    return text if len(text) <= 80 else text[:77] + "..."


def _parsed(address: str) -> tuple[str, int, str, bool]:
    """Host, port, what follows them, and whether media go as uint8."""

    def wrong(problem: str) -> ValueError:
        return ValueError(f"reward {address!r}: {problem}; an address is written http://host:port/path")

    if not re.fullmatch(r"[!-~]+", address):
        raise wrong("blanks and letters beyond ASCII are written with %")
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError as error:
        raise wrong(str(error)) from None
    if parts.scheme != "http":
        raise wrong(f"{parts.scheme}:// is not spoken (for an encrypted way, open a tunnel: ssh -L)")
    if not parts.hostname:
        raise wrong("it names no host")
    if parts.username is not None or parts.password is not None:
        raise wrong("a reward's name is kept with the run, so it may hold no password")
    if parts.fragment not in ("", "uint8", "float32"):
        raise wrong(f"#{parts.fragment} is unknown, #uint8 and #float32 say how media are sent")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return parts.hostname, 80 if port is None else port, path, parts.fragment == "uint8"
