"""What clouds tell a machine that they are about to take away: what to ask, and what an answer means.

The functions know neither clock nor network: the time is an argument.

Sources:
- AWS: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
  `instance-action` has an action and a time, two minutes before a stop or a termination; 404 means that nothing is
  planned. It should be asked every 5 s. The token (IMDSv2):
  https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/configuring-instance-metadata-service.html
- Google: https://cloud.google.com/compute/docs/instances/create-use-spot
  `preempted` becomes TRUE, and the machine has up to 30 s from then on.
- Azure: https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
  Events name their type, their machines and a time. For `Preempt` it is at least 30 s away. Events of other machines
  are listed as well.
"""

import asyncio
import http.client
import json
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final, Literal

import structlog

log = structlog.get_logger()

Cloud = Literal["aws", "gcp", "azure"]

DEFAULT_NOTICE_S: Final = 30.0
"""Time that is left where an answer names none."""
MOST_NOTICE_S: Final = 900.0
"""Limit of what a foreign clock may promise."""
RESERVE_S: Final = 8.0
"""Part of the notice that is left for workers to end, and for records to go."""
_AWS_TOKEN_S: Final = 21600


@dataclass(frozen=True, slots=True)
class Request:
    """One HTTP request to the metadata server."""

    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    method: str = "GET"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a cloud's metadata server is, and how often to ask it."""

    host: str
    interval_s: float
    first: Request | None
    """The request whose answer `question` needs: a token, or the machine's own name."""


ENDPOINTS: Final[Mapping[Cloud, Endpoint]] = {
    "aws": Endpoint(
        "169.254.169.254",
        5.0,
        Request("/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": str(_AWS_TOKEN_S)}, "PUT"),
    ),
    "gcp": Endpoint("metadata.google.internal", 1.0, None),
    "azure": Endpoint(
        "169.254.169.254",
        1.0,
        Request("/metadata/instance/compute/name?api-version=2021-02-01&format=text", {"Metadata": "true"}),
    ),
}


def question(cloud: Cloud, told_first: str) -> Request:
    """Return what to ask again and again. told_first: the answer to the endpoint's first request."""
    if cloud == "aws":
        return Request("/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": told_first})
    if cloud == "gcp":
        return Request("/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
    return Request("/metadata/scheduledevents?api-version=2020-07-01", {"Metadata": "true"})


def notice_s(cloud: Cloud, status: int, body: str, *, own_name: str, now: datetime) -> float | None:
    """Return the seconds until this machine is taken away, at least 0; None: nothing of the kind is planned.

    own_name: the machine's name in the cloud, for clouds that tell of other machines too. Raises ValueError for an
    answer that is none: the cloud is another one, or its server has a fault.
    """
    if cloud == "aws" and status == 404:
        return None
    if status != 200:
        raise ValueError(f"status {status}")
    if cloud == "gcp":
        return DEFAULT_NOTICE_S if body.strip().upper() == "TRUE" else None
    told = json.loads(body)
    if not isinstance(told, dict):
        raise ValueError("no object")
    if cloud == "aws":
        return (
            _left_s(_iso(told.get("time")), now) if told.get("action") in ("stop", "terminate", "hibernate") else None
        )
    events = told.get("Events")
    if not isinstance(events, list):
        raise ValueError("no list of events")
    left = [_left_s(_http_date(event.get("NotBefore")), now) for event in events if _takes_away(event, own_name)]
    return min(left, default=None)


def leave_within_s(notice: float, stop_timeout_s: float) -> float:
    """Return how long a clean leave may wait for its stop boundary, so that the rest fits into the notice."""
    return min(stop_timeout_s, max(notice - RESERVE_S, notice / 2))


def _takes_away(event: object, own_name: str) -> bool:
    """Whether an event of Azure's takes this machine away. Of an event that names no machine each one is meant."""
    if not isinstance(event, dict) or event.get("EventType") not in ("Preempt", "Terminate"):
        return False
    resources = event.get("Resources")
    return not isinstance(resources, list) or not resources or not own_name or own_name in resources


def _left_s(when: datetime | None, now: datetime) -> float:
    if when is None:
        return DEFAULT_NOTICE_S
    return min(max((when - now).total_seconds(), 0.0), MOST_NOTICE_S)


def _iso(told: object) -> datetime | None:
    try:
        return _in_utc(datetime.fromisoformat(told)) if isinstance(told, str) else None
    except ValueError:
        return None


def _http_date(told: object) -> datetime | None:
    """Return Azure's time, such as `Mon, 19 Sep 2016 18:29:47 GMT`; None: it names none, because the event runs."""
    try:
        return _in_utc(parsedate_to_datetime(told)) if isinstance(told, str) and told else None
    except (ValueError, OverflowError):
        return None


def _in_utc(when: datetime) -> datetime:
    return when if when.tzinfo is not None else when.replace(tzinfo=UTC)


TIMEOUT_S: Final = 2.0
MAX_ANSWER_BYTES: Final = 1 << 20
FIRST_AGAIN_S: Final = 3600.0
"""How long the answer to a cloud's first request counts: a token of AWS's is good for six hours."""
COMPLAINT_S: Final = 600.0
"""Pause between two warnings about a server that does not answer."""


class PreemptionWatch:
    """Runs until the cloud gives notice, which it reports once."""

    def __init__(
        self,
        cloud: Cloud,
        on_notice: Callable[[float], None],
        *,
        host: str = "",
        port: int = 80,
        interval_s: float = 0.0,
    ) -> None:
        """on_notice: takes the seconds that are left. host, port, interval_s: other ones than the cloud's own."""
        endpoint = ENDPOINTS[cloud]
        self._cloud, self._on_notice = cloud, on_notice
        self._host, self._port = host or endpoint.host, port
        self._interval_s = interval_s or endpoint.interval_s
        self._first = endpoint.first
        self._told_first, self._told_at = "", -FIRST_AGAIN_S
        self._complained_at = -COMPLAINT_S

    async def run(self) -> None:
        """Ask until there is a notice; then report it and return. A server that does not answer is asked again."""
        while (left_s := await self._ask()) is None:
            await asyncio.sleep(self._interval_s)
        log.warning("preemption_notice", cloud=self._cloud, left_s=round(left_s, 1))
        self._on_notice(left_s)

    async def _ask(self) -> float | None:
        try:
            return await asyncio.to_thread(self._ask_now)
        except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
            self._told_at = -FIRST_AGAIN_S
            if time.monotonic() - self._complained_at >= COMPLAINT_S:
                self._complained_at = time.monotonic()
                log.warning("preemption_not_known", cloud=self._cloud, host=self._host, error=str(error))
            return None

    def _ask_now(self) -> float | None:
        if self._first is not None and time.monotonic() - self._told_at >= FIRST_AGAIN_S:
            status, body = self._send(self._first)
            if status != 200:
                raise ValueError(f"{self._first.path}: status {status}")
            self._told_first, self._told_at = body.strip(), time.monotonic()
        status, body = self._send(question(self._cloud, self._told_first))
        return notice_s(self._cloud, status, body, own_name=self._told_first, now=datetime.now(UTC))

    def _send(self, request: Request) -> tuple[int, str]:
        """Send a request without any proxy: a metadata server answers its own machine alone."""
        with closing(http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)) as connection:
            connection.request(request.method, request.path, headers=dict(request.headers))
            answer = connection.getresponse()
            return answer.status, answer.read(MAX_ANSWER_BYTES).decode("utf-8", errors="replace")
