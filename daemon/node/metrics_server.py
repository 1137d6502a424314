"""The HTTP server of a daemon's metrics: few requests at once, each with a deadline, however slow the reader."""

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

MOST_REQUESTS: Final = 16
REQUEST_LIMIT_S: Final = 15.0
"""From a connection to the last byte of its answer."""
ACCEPT_PAUSE_S: Final = 0.1
STOP_TIMEOUT_S: Final = 5.0


class _SilentHandler(WSGIRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Requests are not logged."""


class MetricsServer(ThreadingMixIn, WSGIServer):
    """A thread for each request, and no more of them than the limit: further connections are closed at once."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, host: str, port: int, registry: CollectorRegistry, *, limit_s: float = REQUEST_LIMIT_S) -> None:
        """port 0: any. Raises OSError when it cannot listen there."""
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        self._free = threading.BoundedSemaphore(MOST_REQUESTS)
        self._limit_s = limit_s
        super().__init__((host, port), _SilentHandler)
        self.set_app(make_wsgi_app(registry))

    def start(self) -> Callable[[], None]:
        """Serve in a thread until the returned function is called."""
        thread = threading.Thread(target=self.serve_forever, name="headway-metrics", daemon=True)
        thread.start()

        def stop() -> None:
            self.shutdown()
            self.server_close()
            thread.join(STOP_TIMEOUT_S)

        return stop

    def get_request(self) -> tuple[Any, Any]:
        """As the base class's. Without a file for the connection it would ask again at once, for as long as that is."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(ACCEPT_PAUSE_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread, if one is free."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started
            self._free.release()
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """In the thread, until the answer is sent or the time is over."""
        over = threading.Timer(self._limit_s, _end, [request])
        over.daemon = True
        over.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            over.cancel()
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that went away is no error of ours."""


def _end(request: Any) -> None:
    with suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)
