"""A service that does what it is told to, connection by connection: real sockets, real deaths."""

import contextlib
import json
import socket
import struct
import threading
import time


def says(status, content, *, length=None):
    """Answer a status line and a body; `length` lies about the body's."""

    def behave(connection):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body) if length is None else length}\r\n\r\n"
        connection.sendall(head.encode() + body)

    return behave


def well(*rewards):
    return says("200 OK", {"rewards": list(rewards)})


def hangs(connection):
    """Never answers; ends when the asker does."""
    with contextlib.suppress(OSError):
        connection.recv(1)


def dribbles(connection):
    """A byte of a header now and then, for ever: no single read ever takes long."""
    with contextlib.suppress(OSError):
        connection.sendall(b"HTTP/1.1 200 OK\r\nX-Patience: ")
        while True:
            connection.sendall(b"x")
            time.sleep(0.02)


def floods(connection):
    with contextlib.suppress(OSError):
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            connection.sendall(b" " * 65536)


def hangs_up(connection):
    """Closes without a word."""


def resets(connection):
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def speaks_in_tongues(connection):
    connection.sendall(b"\x00\xff\x13 not HTTP at all\r\n\r\n")


class Misbehaving:
    """Serves one behaviour a connection, the last for ever; `bodies` are what it was sent."""

    def __init__(self, *behaviours, port=0, reads=True):
        self.behaviours, self.bodies, self.heads, self.times, self._reads = list(behaviours), [], [], [], reads
        self._socket = socket.create_server(("127.0.0.1", port))
        self.port = self._socket.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}/score"
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exc):
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(5)
        assert not self._thread.is_alive()

    def _serve(self):
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.times.append(time.monotonic())
            behave = self.behaviours.pop(0) if len(self.behaviours) > 1 else self.behaviours[0]
            with connection:
                if self._reads:
                    self._read(connection)
                behave(connection)

    def _read(self, connection):
        received = b""
        while b"\r\n\r\n" not in received:
            received += connection.recv(65536)
        head, body = received.split(b"\r\n\r\n", 1)
        size = int(next(line.split(b":")[1] for line in head.split(b"\r\n") if line.startswith(b"Content-Length")))
        while len(body) < size:
            body += connection.recv(1 << 20)
        self.heads.append(head.decode())
        self.bodies.append(body)


def free_port():
    """A port that nobody listens on: a connection to it is refused."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]
