"""Entries of systemd's journal: searched by fields, and never a reason to wait or to lose a line."""

import io
import os
import socket
import struct
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import structlog
from hypothesis import example, given
from hypothesis import strategies as st

from headway.daemon.base.logging import (
    JournalLogger,
    JournalRenderer,
    JournalSocket,
    datagram,
    fields_of,
    is_journal,
)


def parse(entry: bytes) -> dict[str, str]:
    """Read an entry as journald does."""
    fields = {}
    while entry:
        line, _, rest = entry.partition(b"\n")
        name, is_short, value = line.partition(b"=")
        if not is_short:
            (length,) = struct.unpack("<Q", rest[:8])
            value, end, rest = rest[8 : 8 + length], rest[8 + length : 9 + length], rest[9 + length :]
            assert end == b"\n"
        fields[name.decode()] = value.decode()
        entry = rest
    return fields


@pytest.fixture
def journal() -> Iterator[socket.socket]:
    """A socket that stands in for journald's."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"{folder}/socket")
        listener.settimeout(10)
        yield listener


@example({"MESSAGE": "a line\nHEADWAY_JOB=another"})
@given(st.dictionaries(st.sampled_from(["MESSAGE", "HEADWAY_JOB", "X"]), st.text(st.characters(codec="utf-8"))))
def test_what_is_written_is_what_journald_reads(fields: dict[str, str]) -> None:
    """Line breaks, = and names of other fields inside a value stay in that value."""
    assert parse(datagram(fields)) == fields


def test_a_line_has_its_job_and_its_priority() -> None:
    """Empty values are no fields, and neither is what nobody searches by."""
    event = {"event": "plan_published", "job": "small", "generation": 4, "peer": "", "level": "warning", "bytes": 7}
    assert fields_of(event) == {
        "PRIORITY": "4",
        "SYSLOG_IDENTIFIER": "headway",
        "HEADWAY_JOB": "small",
        "HEADWAY_EVENT": "plan_published",
        "HEADWAY_GENERATION": "4",
    }


def test_a_logged_line_is_an_entry(journal: socket.socket) -> None:
    """The message is the JSON that a pipe gets; bound values are fields too."""
    stream = io.StringIO()
    with closing(JournalSocket(journal.getsockname())) as taker:
        logger = structlog.wrap_logger(
            JournalLogger(stream, taker), processors=[structlog.processors.add_log_level, JournalRenderer()]
        )
        logger.bind(node="a").error("worker_lost", job="small")
    entry = parse(journal.recv(65536))
    assert entry["MESSAGE"] == '{"node": "a", "job": "small", "event": "worker_lost", "level": "error"}'
    assert (entry["HEADWAY_NODE"], entry["HEADWAY_JOB"], entry["PRIORITY"]) == ("a", "small", "3")
    assert stream.getvalue() == ""


def test_what_the_journal_does_not_take_goes_to_the_stream(journal: socket.socket, tmp_path: Path) -> None:
    """A journal that is away, one whose queue is full, and a line that is too large for it: none is waited for."""
    with closing(JournalSocket(journal.getsockname())) as full, closing(JournalSocket(str(tmp_path / "x"))) as absent:
        while full.send({"MESSAGE": "x"}):
            pass
        for taker, message in ((absent, "away"), (full, "full"), (full, "z" * (1 << 20))):
            stream = io.StringIO()
            JournalLogger(stream, taker).msg(message, fields={"PRIORITY": "6"})
            assert stream.getvalue() == message + "\n"


def test_only_the_stream_that_systemd_names_is_the_journal(tmp_path: Path) -> None:
    """A redirected stream, a closed one and one without a file are not."""
    with (tmp_path / "log").open("w") as stream:
        told = os.fstat(stream.fileno())
        named = {"JOURNAL_STREAM": f"{told.st_dev}:{told.st_ino}"}
        assert is_journal(stream, named)
        assert not is_journal(stream, {"JOURNAL_STREAM": "1:2"})
        assert not is_journal(stream, {})
    assert not is_journal(stream, named)
    assert not is_journal(io.StringIO(), named)
