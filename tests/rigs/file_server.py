"""A web server of one folder that answers by range, notes what it was asked, and can damage, delay or refuse."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


@dataclass
class FileServer:
    """The server's state."""

    folder: Path
    url: str = ""
    asked: list[tuple[str, int]] = field(default_factory=list)
    """(file, first byte) of each request for content."""
    status: int = 200
    """Answer to every request; 200: serve."""
    damage: bool = False
    """Alter the first byte of each answer."""
    is_endless: bool = False
    """Answer to a range with bytes without end."""
    gate: threading.Event = field(default_factory=threading.Event)
    """Content comes once this is set."""

    def content(self, path: str, wanted_range: str | None) -> tuple[int, bytes, int]:
        """Return status, content and the file's size."""
        file = self.folder / path.lstrip("/").partition("?")[0]
        if self.status != 200 or not file.is_file():
            return self.status if self.status != 200 else 404, b"", 0
        raw = file.read_bytes()
        begin, end = 0, len(raw)
        if wanted_range and (found := re.fullmatch(r"bytes=(\d+)-(\d*)", wanted_range)):
            begin, end = int(found[1]), min(int(found[2]) + 1, len(raw)) if found[2] else len(raw)
        return (206 if wanted_range else 200), raw[begin:end], len(raw)


@contextmanager
def serving(folder: Path) -> Iterator[FileServer]:
    """Serve a folder on the loopback."""
    state = FileServer(folder)
    state.gate.set()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

        def do_HEAD(self) -> None:
            """Answer with the size."""
            status, content, _ = state.content(self.path, None)
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Accept-Ranges", "bytes")
            self.end_headers()

        def _flood(self, status: int) -> None:
            """Send bytes until the client hangs up."""
            self.send_response(status)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.close_connection = True
            with suppress(OSError):
                while True:
                    self.wfile.write(b"100000\r\n" + bytes(1 << 20) + b"\r\n")

        def do_GET(self) -> None:
            """Answer with a range."""
            wanted = self.headers.get("Range")
            status, content, size = state.content(self.path, wanted)
            begin = int(wanted.partition("=")[2].partition("-")[0]) if wanted else 0
            state.asked.append((self.path.rpartition("/")[2], begin))
            state.gate.wait(30)
            if state.is_endless:
                self._flood(status)
                return
            if state.damage and content:
                content = bytes([content[0] ^ 1]) + content[1:]
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            if status == 206:
                self.send_header("Content-Range", f"bytes {begin}-{begin + len(content) - 1}/{size}")
            self.end_headers()
            self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        state.gate.set()
        server.shutdown()
        server.server_close()
        thread.join()
