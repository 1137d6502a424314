"""A job opens what lies below a node's allowed places, and nothing else, whatever way its path takes there."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headway.daemon.base import allowed_places
from headway.daemon.base.allowed_places import AllowedPlaces
from headway.daemon.base.errors import ConfigError, NoAccessError
from headway.daemon.base.file_system import allow_only
from headway.daemon.blobs.checkpoint import probe, read_chunks_of
from headway.daemon.models.origin_folder import OriginFolder

PLACES = AllowedPlaces(["/srv/headway", "s3://lab/runs", "hf://", "file:///data"])


@pytest.fixture
def unlimited() -> Iterator[None]:
    """Whatever a test allows, the next one may do everything."""
    yield
    allow_only(None)


@pytest.mark.parametrize(
    "place",
    [
        *("/srv/headway", "/srv/headway/a/b", "/srv/./headway/x", "file:///srv/headway/x", "/data", "local:///data/x"),
        *("s3://lab/runs", "s3://lab/runs/7", "s3://lab//runs/7", "hf://Qwen/Qwen3-4B"),
    ],
)
def test_what_lies_below_an_allowed_place_is_opened(place: str) -> None:
    """The place itself, and all below it."""
    assert PLACES.why_not(place) == ""


@pytest.mark.parametrize(
    "place",
    [
        *("/srv", "/srv/headway-2", "/etc/passwd", "/srv/headway/../other", "file:///srv/headway/../../etc", "/"),
        *("s3://lab", "s3://lab/runs-2", "s3://other/runs", "gs://lab/runs", "http://169.254.169.254/latest"),
        *("s3://lab/runs/../secret", "s3://lab/runs/%2e%2e/secret", "S3://lab/runs/x/../../..", "relative/path"),
        *("simplecache::s3://lab/runs", "zip://x::/srv/headway/a.zip", "hf:/x", ""),
        *("s3://lab/runs/..?x", "s3://lab/runs/..#x", "s3://lab/runs/..;x", "s3://lab/runs/..\\..\\x"),
        *("s3://lab/runs/.\t./x", "s3://lab/runs/\n../x", "/srv/headway/\0", "/srv/headway/\x1b[2J", "//etc/passwd"),
    ],
)
def test_everything_else_is_refused(place: str) -> None:
    """Beside, above, around by `..` or its code, another bucket or scheme, chained file systems.

    HTTP clients take `..` before a query for a step upwards, and leave tabs out.
    """
    assert PLACES.why_not(place)


def test_a_link_counts_as_where_it_leads(tmp_path: Path) -> None:
    """Out of an allowed folder: refused. Into one: allowed."""
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    (inside / "way-out").symlink_to(outside)
    (outside / "way-in").symlink_to(inside)
    places = AllowedPlaces([str(inside)])
    assert places.why_not(str(inside / "way-out" / "file"))
    assert not places.why_not(str(outside / "way-in" / "file"))


@pytest.mark.parametrize(
    "place",
    [
        *("/srv/x", "/dev/shm/x", "/etcetera", "hf://a/b", "https://a/b", "s3://a", "sftp://a/b"),
        *(
            "http://10.0.0.5/b",
            "http://[fd00:0:0:0:0:0:0:5]:80/b",
            "https://metadata.example/b",
            "s3://169-254/b",
            "http://1:x",
        ),
    ],
)
def test_without_places_what_training_needs_is_opened(place: str) -> None:
    """As for a node that sets none."""
    assert not AllowedPlaces().why_not(place)


@pytest.mark.parametrize(
    ("place", "why"),
    [
        *((place, "own") for place in ("/etc/shadow", "/proc/self/environ", "file:///sys", "/srv/../run/secrets/x")),
        *((f"{scheme}://x", "name") for scheme in ("zip", "github", "memory", "reference", "jupyter", "dask", "x")),
        ("simplecache::s3://lab/runs", "chains"),
        *(
            (f"http://{host}/latest/meta-data", "own")
            for host in (
                *("169.254.169.254", "169.254.169.254:80", "user@169.254.169.254", "169.254.43518", "0xA9FEA9FE"),
                *(
                    "2852039166",
                    "0251.0376.0251.0376",
                    "[fd00:ec2:0:0:0:0:0:254]",
                    "[fe80:0:0:0:0:0:0:1]:80",
                    "[0:0:0:0:0:ffff:a9fe:a9fe]",
                ),
                *("metadata.google.internal", "Metadata.Google.Internal.", "169%2e254.169.254"),
                *("169.254.169.254?x", "169.254.169.254#x", "metadata.google.internal?x", "100.100.100.200"),
            )
        ),
    ],
)
def test_without_places_the_machine_itself_is_not(place: str, why: str) -> None:
    """Its settings and secrets, and what is no place of data."""
    assert why in AllowedPlaces().why_not(place)


def test_an_administrator_may_allow_what_is_refused_at_first() -> None:
    """The setting's own words count."""
    places = AllowedPlaces(["/etc/models", "github://lab", "http://169.254.1.2/data"])
    assert not places.why_not("http://169.254.1.2/data/x")
    assert not places.why_not("/etc/models/a")
    assert not places.why_not("github://lab/a")


def test_the_folder_of_the_keys_is_never_opened(tmp_path: Path) -> None:
    """Not even below an allowed place, or by a link."""
    keys = tmp_path / "keys"
    keys.mkdir()
    (tmp_path / "link").symlink_to(keys)
    for places in (AllowedPlaces([str(tmp_path)], never=[str(keys)]), AllowedPlaces(never=[str(keys)])):
        assert "own" in places.why_not(str(tmp_path / "link" / "key.pem"))
        assert not places.why_not(str(tmp_path / "data"))


@pytest.mark.parametrize("place", ["relative", "", "s3://lab/..", "a::/b"])
def test_a_setting_that_is_no_place_is_refused(place: str) -> None:
    with pytest.raises(ConfigError):
        AllowedPlaces([place])


@pytest.mark.usefixtures("unlimited")
def test_every_file_system_of_a_job_is_opened_through_the_limit(tmp_path: Path) -> None:
    """A checkpoint folder beside the allowed one gets no file, and the line names it."""
    allow_only(AllowedPlaces([str(tmp_path / "allowed")]))
    probe(str(tmp_path / "allowed" / "job"))
    with pytest.raises(NoAccessError, match=r"/other/\S+: is not below one of this node's allowed_places$"):
        probe(str(tmp_path / "other"))
    assert not (tmp_path / "other").exists()


@pytest.mark.usefixtures("unlimited")
@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_file_of_an_allowed_folder_that_leads_out_is_not_read(tmp_path: Path, scheme: str) -> None:
    """Its bytes would go to whoever fetches the part, before anybody compares a checksum. One that leads in is read."""
    model = folder_of_a_model(tmp_path)
    allow_only(AllowedPlaces([str(tmp_path)], never=[str(tmp_path / "keys")]))
    folder = OriginFolder(f"{scheme}{model}")
    assert b"".join(folder.read("config.json", 0, 2)) == b"{}"
    for read in (folder.has, folder.size_of, lambda name: list(folder.read(name, 0, 3))):
        with pytest.raises(NoAccessError, match=r"tokenizer\.json: is a place of this node's own"):
            read("tokenizer.json")
    with pytest.raises(NoAccessError, match=r"tokenizer\.json: is a place of this node's own"):
        list(read_chunks_of(f"{scheme}{model}/tokenizer.json"))


def of_a_model(path: Path) -> Iterator[bytes]:
    """A file of a model's folder."""
    return OriginFolder(str(path.parent)).read(path.name, 0, 3)


def of_a_checkpoint(path: Path) -> Iterator[bytes]:
    """A file of a checkpoint."""
    return read_chunks_of(str(path))


@pytest.mark.usefixtures("unlimited")
@pytest.mark.parametrize("read", [of_a_model, of_a_checkpoint])
def test_a_link_that_changes_between_the_look_and_the_opening_leads_nowhere(
    tmp_path: Path, read: Callable[[Path], Iterator[bytes]]
) -> None:
    """What counts is the file that is open."""
    model, link = folder_of_a_model(tmp_path), tmp_path / "model/vocab.json"
    link.symlink_to(model / "config.json")

    class Flipped(AllowedPlaces):
        """Somebody changes the link as soon as it has been looked at."""

        def why_not(self, place: str) -> str:
            told = super().why_not(place)
            if place.endswith("vocab.json"):
                link.unlink()
                link.symlink_to(tmp_path / "keys/key.pem")
            return told

    allow_only(Flipped([str(tmp_path)], never=[str(tmp_path / "keys")]))
    with pytest.raises(NoAccessError, match=r"key\.pem: is a place of this node's own"):
        list(read(link))


def folder_of_a_model(tmp_path: Path) -> Path:
    """One with a link to the node's key under the name of a tokenizer, and one to another file of the model."""
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys/key.pem").write_bytes(b"key")
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs/config").write_bytes(b"{}")
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").symlink_to(tmp_path / "keys/key.pem")
    (model / "config.json").symlink_to(tmp_path / "blobs/config")
    return model


def test_a_path_that_this_process_may_not_follow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As /proc/1/root for some releases of Python: one line, and no other error."""

    def realpath(_: str) -> str:
        raise PermissionError(13, "Permission denied")

    places = AllowedPlaces()
    monkeypatch.setattr(allowed_places._parts, "__kwdefaults__", {"follow": realpath})
    assert places.why_not("/data/x").endswith("cannot be followed: Permission denied")
