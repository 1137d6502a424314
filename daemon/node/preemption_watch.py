"""Asks the cloud's metadata server whether it is about to take this machine away."""

import asyncio
import http.client
import time
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from typing import Final

import structlog

from headway.daemon.node.preemption import ENDPOINTS, Cloud, Request, notice_s, question

log = structlog.get_logger()

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
