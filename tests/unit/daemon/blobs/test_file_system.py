"""Drivers' errors, as people and the rest of a daemon see them."""

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from headway.daemon.base.errors import ConfigError, NoAccessError, RecoveryError, StorageAwayError
from headway.daemon.base.file_system import file_system_of, open_url
from headway.daemon.blobs.checkpoint import (
    copy_to_checkpoint,
    delete_checkpoint,
    layer_at,
    list_boundaries,
    probe,
    read_manifest,
    write_manifest,
)
from headway.daemon.blobs.file_threads import FileThreads
from headway.daemon.client.checkpoint_folder import read_checkpoint
from headway.stages.state.file_digest import FileDigest
from tests.rigs.moody_file_system import Mood, moody
from tests.rigs.stored_files import fetch_from, fetch_layer

URL = "moody://bucket/j/u/00000001-0000000005"


class BotoCoreError(Exception):
    """An error as botocore's: no OSError."""


class EndpointConnectionError(BotoCoreError):
    pass


class NoCredentialsError(BotoCoreError):
    pass


@pytest.fixture
def mood() -> Iterator[Mood]:
    with moody() as mood:
        yield mood


ERRORS: list[tuple[BaseException, type[RecoveryError], str]] = [
    (EndpointConnectionError('Could not connect to "http://h/"'), RecoveryError, "its server does not answer (Could"),
    (NoCredentialsError("Unable to locate credentials"), NoAccessError, "this node has no credentials for it (Unable"),
    (PermissionError("Forbidden"), NoAccessError, "this node has no access: Forbidden"),
    (ImportError("Install s3fs to access S3"), NoAccessError, "Install s3fs to access S3"),
    (TimeoutError(), RecoveryError, "its server does not answer (TimeoutError)"),
    (KeyError("ETag"), RecoveryError, "KeyError: 'ETag'"),
    (RecursionError("deep"), RecoveryError, "RecursionError: deep"),
    (OSError("Connection pool is full\nTraceback …"), RecoveryError, "Connection pool is full"),
    (RuntimeError("\x1b[31mred"), RecoveryError, "RuntimeError: ?[31mred"),
]


@pytest.mark.parametrize(("raised", "kind", "words"), ERRORS, ids=lambda value: type(value).__name__)
def test_every_error_is_ours_with_the_url_and_one_line(
    mood: Mood, tmp_path: Path, raised: BaseException, kind: type[RecoveryError], words: str
) -> None:
    """Whatever a driver raises, in each thing that is done with checkpoints: our error, the URL, one plain line."""
    source = tmp_path / "layer"
    source.write_bytes(b"x" * 10)
    file = FileDigest(size_bytes=10, checksum="")
    reads: list[Callable[[], object]] = [
        lambda: read_manifest(URL),
        lambda: fetch_layer(URL, "head", file, tmp_path / "back"),
    ]
    calls: list[Callable[[], object]] = [
        lambda: copy_to_checkpoint(source, URL, "head"),
        lambda: write_manifest(URL, b"{}"),
        *reads,
        lambda: delete_checkpoint(URL),
        lambda: list_boundaries("moody://bucket"),
        lambda: probe("moody://bucket"),
    ]
    write_manifest(URL, b"{}")
    mood.error = lambda: raised
    for call in calls:
        with pytest.raises(RecoveryError) as caught:
            call()
        assert type(caught.value) is (StorageAwayError if call in reads and kind is RecoveryError else kind)
        assert caught.value.item.startswith("moody://bucket")
        assert words in caught.value.reason
        assert str(caught.value).isprintable()
    with pytest.raises(ConfigError, match=r"moody://bucket") as told:
        read_checkpoint("moody://bucket")
    assert words in told.value.what


def test_a_dead_web_proxy_is_named_beside_the_server(mood: Mood, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver says only that a connection was refused, and the Hub's did not refuse it."""
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    mood.error = lambda: type("ConnectError", (Exception,), {})("[Errno 111] Connection refused")
    found = r"its server, or the web proxy of the environment, does not answer \(\[Errno 111\] Connection refused\)"
    with pytest.raises(RecoveryError, match=found):
        read_manifest(URL)


def test_a_cause_counts_as_well(mood: Mood) -> None:
    """A driver wraps the missing credentials into an error of its own."""

    def wrapped() -> BaseException:
        error = RuntimeError("request failed")
        error.__cause__ = NoCredentialsError("none")
        return error

    mood.error = wrapped
    with pytest.raises(NoAccessError, match="no credentials"):
        read_manifest(URL)


def test_a_missing_driver_package_is_named() -> None:
    """fsspec knows the protocol, and its package is not installed here."""
    with pytest.raises(NoAccessError, match=r"^dropbox://folder: cannot be opened: .*nstall"):
        open_url("dropbox://folder")


def test_a_broken_copy_does_not_appear(mood: Mood, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The source fails in the middle of an upload: the driver is told to discard it, and no close completes it."""
    from fsspec.spec import AbstractBufferedFile

    ended: list[str] = []

    class Upload(AbstractBufferedFile):  # type: ignore[misc]
        """An upload to an object store: a closed file exists."""

        def _initiate_upload(self) -> None:
            pass

        def _upload_chunk(self, final: bool = False) -> bool:
            ended.append("completed" if final else "part")
            return True

        def discard(self) -> None:
            ended.append("discarded")

    file_system, _ = open_url(URL)
    monkeypatch.setattr(
        type(file_system), "_open", lambda self, path, mode="rb", **_: Upload(self, path, mode, block_size=1 << 20)
    )
    source = tmp_path / "layer"
    source.write_bytes(bytes(5 << 20))

    def interrupt(num_bytes: int) -> None:
        if "part" in ended:
            raise OSError("the disk has gone")

    with pytest.raises(RecoveryError, match="the disk has gone"):
        copy_to_checkpoint(source, URL, "head", before=interrupt)
    assert ended[-1] == "discarded"
    assert "completed" not in ended


def test_a_file_larger_than_its_manifest_says_is_cut(mood: Mood, tmp_path: Path) -> None:
    """100 MB lie where the manifest says 1 KB: no more than that is taken, and nothing stays."""
    source, target = tmp_path / "layer", tmp_path / "in" / "back"
    target.parent.mkdir()
    with source.open("wb") as file:
        file.truncate(100 << 20)
    copy_to_checkpoint(source, URL, "head")
    expected, most = FileDigest(size_bytes=1000, checksum=""), 0
    stored = layer_at(URL, "head", expected, FileThreads("tests"))

    async def watched(offset: int) -> AsyncIterator[bytes]:
        nonlocal most
        async for piece in stored.read(offset):
            yield piece
            most = max(most, sum(path.stat().st_size for path in target.parent.iterdir()))

    with pytest.raises(RecoveryError, match=r"head\.safetensors: is damaged: it has more than its 1000 bytes"):
        fetch_from(replace(stored, read=watched), expected, target)
    assert most <= 1000
    assert list(target.parent.iterdir()) == []


@pytest.mark.parametrize("raw", [b"[" * 100_000, b'{"timeline": 1e999}', b"\xff\xfe", b'{"timeline": 1,', b"{}" * 9])
def test_a_crafted_manifest_is_one_line(mood: Mood, raw: bytes) -> None:
    """Deep, out of range, no text, half: told in one line to a daemon and to a person."""
    write_manifest(URL, raw)
    with pytest.raises(RecoveryError, match="is not a checkpoint's manifest"):
        read_manifest(URL)
    with pytest.raises(ConfigError, match="is not a checkpoint's manifest") as caught:
        read_checkpoint("moody://bucket")
    assert str(caught.value).isprintable()


def test_a_manifest_of_any_length_is_not_read_whole(mood: Mood, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on beyond what a manifest may have: told, without reading all of it."""
    monkeypatch.setattr("headway.daemon.blobs.checkpoint.MAX_MANIFEST_BYTES", 1 << 20)
    write_manifest(URL, b" " * (3 << 20))
    with pytest.raises(RecoveryError, match="has more than 1048576 bytes"):
        read_manifest(URL)


def test_hung_calls_are_counted_per_file_system() -> None:
    """Two buckets, two mounts: each is its own."""
    assert file_system_of("s3://a/x/y") == file_system_of("s3://a/z") != file_system_of("s3://b/x")
    assert file_system_of("/mnt/a/x/y") == file_system_of("/mnt/a/z") != file_system_of("/mnt/b/x")
