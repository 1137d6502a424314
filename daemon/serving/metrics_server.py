"""The HTTP server of a daemon's metrics: few requests at once, each with a deadline, at any speed of the reader."""

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

MOST_REQUESTS: Final = 16
MOST_OF_ADDRESS: Final = 4
"""Maximum number of requests of one address: more than one Prometheus has at once."""
REQUEST_LIMIT_S: Final = 15.0
"""Time from a connection to the last byte of its answer."""
ACCEPT_PAUSE_S: Final = 0.1
STOP_TIMEOUT_S: Final = 5.0


class _SilentHandler(WSGIRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Log nothing about requests."""


class MetricsServer(ThreadingMixIn, WSGIServer):
    """A thread for each request up to the limit; further connections are closed at once."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, host: str, port: int, registry: CollectorRegistry, *, limit_s: float = REQUEST_LIMIT_S) -> None:
        """port 0: any free port. Raises OSError when the server cannot listen there."""
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        self._served = Counter[str]()
        """Number of requests by address."""
        self._changing = threading.Lock()
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
        """Get a request as the base class does. Without a free file it waits, because the base class would retry at
        once.
        """
        try:
            return super().get_request()
        except OSError:
            time.sleep(ACCEPT_PAUSE_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Process a request in a thread, if one is free for this address."""
        if not self._is_begun(client_address[0]):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started
            self._is_over(client_address[0])
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer in the thread, until the answer is sent or the time is over."""
        over = threading.Timer(self._limit_s, _end, [request])
        over.daemon = True
        over.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            over.cancel()
            self._is_over(client_address[0])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a reader that went away: it is no error of ours."""

    def _is_begun(self, host: str) -> bool:
        """Count a request, unless there are too many."""
        with self._changing:
            if self._served.total() >= MOST_REQUESTS or self._served[host] >= MOST_OF_ADDRESS:
                return False
            self._served[host] += 1
            return True

    def _is_over(self, host: str) -> None:
        with self._changing:
            self._served[host] -= 1
            self._served += Counter()  # addresses without requests are dropped


def _end(request: Any) -> None:
    with suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)
