"""A daemon's lines to the process that serves its port: the last one holds, in whatever pieces they come."""

import os
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from headway.daemon.net.outpost import FrontOrder, OrderReader, Post


def test_the_last_whole_line_holds(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[Any] = []
    front: Any = SimpleNamespace(expect=told.append)
    outpost: Any = SimpleNamespace(stand_by=told.append)
    reader = OrderReader(front, outpost)
    read_end, write_end = os.pipe2(os.O_NONBLOCK)
    lines = [
        msgspec.json.encode(order) + b"\n"
        for order in (
            FrontOrder(tokens={"t": "far"}),
            FrontOrder(tokens={"u": "far"}, posts=(Post("10.0.0.7", 7070, "mine"),)),
        )
    ]
    raw = b"".join(lines)
    for piece in (raw[:5], raw[5:-3]):
        os.write(write_end, piece)
        reader.read(read_end)
    assert told == [{"t": "far"}, ()]
    os.write(write_end, raw[-3:])
    reader.read(read_end)
    assert told[2:] == [{"u": "far"}, (Post("10.0.0.7", 7070, "mine"),)]
    for nonsense in (b"nonsense\n", b"\xff{}\n", b'{"tokens":[]}\n', b'{"a":' * 2000 + b"\n"):
        os.write(write_end, nonsense)
        reader.read(read_end)
        assert "cannot be read" in capsys.readouterr().err
    assert len(told) == 4
    os.close(read_end)
    os.close(write_end)
