"""A watch at a server that is starting: it may forbid what it allows a moment later."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from headway.daemon.base.errors import StoreUnreachableError
from headway.daemon.cluster import watch

FORBIDDEN = watch._ForbiddenError("etcd", "cancelled the watch: permission denied")


@dataclass
class Server:
    """Answers each stream with replies, or an error at the end."""

    answers: list[list[object]]
    user: str = "root"
    num_logins: int = 0
    access: Any = field(init=False)

    def __post_init__(self) -> None:
        self.access = SimpleNamespace(user=self.user)

    async def log_in(self) -> None:
        self.num_logins += 1

    async def stream(self, *_: object) -> AsyncIterator[object]:
        for answer in self.answers.pop(0):
            if isinstance(answer, Exception):
                raise answer
            yield answer


async def replies(server: Server, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    monkeypatch.setattr(watch, "_stream", server.stream)
    return [reply async for reply in watch._stream_with_login(server, "/", 1, watch.never)]  # type: ignore[arg-type]


async def test_a_forbidden_watch_is_asked_for_again_after_a_login(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once: a server that still forbids it means it."""
    server = Server([[FORBIDDEN], ["created", "event"]])
    assert await replies(server, monkeypatch) == ["created", "event"]
    assert server.num_logins == 1
    with pytest.raises(StoreUnreachableError, match="permission denied"):
        await replies(Server([[FORBIDDEN], [FORBIDDEN]]), monkeypatch)


@pytest.mark.parametrize("server", [Server([["created", FORBIDDEN]]), Server([[FORBIDDEN]], user="")])
async def test_a_watch_that_has_begun_or_has_no_user_ends(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second stream would tell the first one's events again."""
    with pytest.raises(StoreUnreachableError, match="permission denied"):
        await replies(server, monkeypatch)
    assert server.num_logins == 0
