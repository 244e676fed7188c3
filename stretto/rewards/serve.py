"""The least server of a remote reward: `python -m stretto.rewards.serve NAME --port P [--host H]`.

Serves one reward, shipped or your own, at every path of http://H:P, in the format of `stretto.rewards.wire`; GET
answers which it is. It needs torch, numpy and safetensors and nothing else that stretto needs, so `pip install
--no-deps stretto` puts it into an environment that is made for a scorer. Requests come on threads and are scored one
after another; one whose asker has gone meanwhile is dropped, so that impatience does not pile up. The hazard: there
is no password, and whoever reaches the port may use it; the default host is this machine alone.
"""

import argparse
import json
import select
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from stretto.rewards import load_reward
from stretto.rewards.failures import RewardError, ServiceError
from stretto.rewards.scoring import ask
from stretto.rewards.wire import unpack

__all__ = ["RewardServer", "main"]

MAX_BODY_BYTES = 1 << 32
CLOSING_S = 10.0
"""How long a batch that is being scored is waited for at the end."""
STALLED_S = 60.0
"""A connection that is silent for so long is closed."""


class RewardServer(ThreadingHTTPServer):
    """Serves `function` under `name` on (host, port); port 0 takes a free one. Raises OSError."""

    daemon_threads = True

    def __init__(self, name: str, function: Callable[..., Any], host: str, port: int) -> None:
        super().__init__((host, port), _Requests)
        self.name, self.function = name, function
        self.one_at_a_time = threading.Lock()

    @property
    def address(self) -> str:
        """What a recipe calls this reward."""
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}/"

    def answer(self, body: bytes, is_gone: Callable[[], bool]) -> tuple[int, dict[str, Any]] | None:
        """Status and JSON for one request's body; None where the asker `is_gone` when its turn comes."""
        with self.one_at_a_time:
            return None if is_gone() else self._scored(body)

    def _scored(self, body: bytes) -> tuple[int, dict[str, Any]]:
        try:
            media, prompts, columns = unpack(body)
        except ValueError as error:
            return 400, {"error": str(error), "row": None}
        if not media.dtype.is_floating_point:
            media = media.float() / 255
        rows = [str(row) for row in range(len(prompts))]
        try:
            return 200, {"rewards": ask(self.name, self.function, media, prompts, rows, columns)}
        except RewardError as error:
            row = {f"sample {row}": int(row) for row in rows}.get(error.sample)
            return 422, {"error": error.problem, "row": row}
        except ServiceError as error:
            return 503, {"error": f"the service behind this one {error}", "row": None}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say what went wrong, unless the asker has only gone."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Requests(BaseHTTPRequestHandler):
    server: RewardServer
    timeout = STALLED_S
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Which reward this is."""
        self._send(200, {"reward": self.server.name})

    def do_POST(self) -> None:
        """Score one batch."""
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            self._send(411, {"error": "say the body's length (Content-Length)", "row": None})
        elif int(length) > MAX_BODY_BYTES:
            self._send(
                413, {"error": f"a body has at most {MAX_BODY_BYTES} bytes; send smaller batches", "row": None}
            )
        else:
            body = self.rfile.read(int(length))
            answer = self.server.answer(body, self._is_gone) if len(body) == int(length) else None
            if answer is not None:
                self._send(*answer)
        self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of requests; the one who asks counts them."""

    def _is_gone(self) -> bool:
        """Whether the other end has closed: readable, and nothing to read."""
        is_readable = bool(select.select([self.connection], [], [], 0)[0])
        return is_readable and not self.connection.recv(1, socket.MSG_PEEK)

    def _send(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)


def main(words: Sequence[str] | None = None) -> int:
    """Serve until Ctrl-C; 2 and one line for a wrong name, or a port that cannot be had."""
    parser = argparse.ArgumentParser(prog="python -m stretto.rewards.serve", description="Serve one reward by HTTP.")
    parser.add_argument("name", help="digits, brightness, package.module:function or path/to/file.py:function")
    parser.add_argument("--port", type=int, required=True, help="0 takes a free one")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 for every network that this machine is on")
    asked = parser.parse_args(words)
    try:
        server = RewardServer(asked.name, load_reward(asked.name), asked.host, asked.port)
    except (ValueError, OSError, OverflowError) as error:
        print(f"stretto.rewards.serve: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    with server:
        print(f"{asked.name} is served at {server.address}", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            # A thread that is inside torch when the interpreter ends would abort the process.
            server.one_at_a_time.acquire(timeout=CLOSING_S)
            return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
