"""The metadata servers of three clouds, as one process of a test asks them."""

import json
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, Self


def azure(*events: dict[str, Any]) -> str:
    """The answer of Azure's server."""
    return json.dumps({"DocumentIncarnation": 1, "Events": list(events)})


PREEMPT: dict[str, Any] = {
    "EventId": "A",
    "EventType": "Preempt",
    "EventStatus": "Scheduled",
    "Resources": ["mine", "yours"],
    "NotBefore": "Thu, 01 Jan 2026 12:00:40 GMT",
}


class Metadata(ThreadingHTTPServer):
    """The metadata servers of three clouds; each refuses what the real one refuses."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self._thread = Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})
        self.is_taken = False
        """Whether a notice is out."""
        self.num_tokens = 0
        self.num_answered = 0
        self.num_faults = 0
        """Requests that are answered with status 503 from now on."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join(10)
        self.server_close()

    @property
    def port(self) -> int:
        """Return the port on the loopback."""
        return int(self.server_address[1])

    def answer(self, method: str, path: str, header: "dict[str, str]") -> tuple[int, str]:
        """Return the status and the body."""
        self.num_answered += 1
        if self.num_faults:
            self.num_faults -= 1
            return 503, ""
        match method, path.partition("?")[0]:
            case "PUT", "/latest/api/token":
                self.num_tokens += 1
                has_ttl = "x-aws-ec2-metadata-token-ttl-seconds" in header
                return (200, f"token-{self.num_tokens}") if has_ttl else (400, "")
            case "GET", "/latest/meta-data/spot/instance-action":
                if header.get("x-aws-ec2-metadata-token") != f"token-{self.num_tokens}":
                    return 401, ""
                when = datetime.now(UTC) + timedelta(seconds=120)
                notice = json.dumps({"action": "terminate", "time": f"{when:%Y-%m-%dT%H:%M:%SZ}"})
                return (200, notice) if self.is_taken else (404, "")
            case "GET", "/computeMetadata/v1/instance/preempted" if header.get("metadata-flavor") == "Google":
                return 200, str(self.is_taken).upper()
            case "GET", "/metadata/instance/compute/name" if header.get("metadata") == "true":
                return 200, "mine"
            case "GET", "/metadata/scheduledevents" if header.get("metadata") == "true":
                when = datetime.now(UTC) + timedelta(seconds=60)
                event = PREEMPT | {"NotBefore": f"{when:%a, %d %b %Y %H:%M:%S GMT}"}
                return 200, azure(PREEMPT | {"Resources": ["yours"]}, *([event] if self.is_taken else []))
        return 400, ""


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Metadata)
        status, body = self.server.answer(self.command, self.path, {key.lower(): v for key, v in self.headers.items()})
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    do_PUT = do_GET  # noqa: N815 - the library's name

    def log_message(self, *_: object) -> None:
        """Say nothing."""
