"""A killed process's files in shared memory go with the next process of its user."""

import subprocess
import sys
from pathlib import Path

from headway.daemon.base.owned_folders import OwnedFolder, remove_ownerless

OWNER = """
import sys
from pathlib import Path
from headway.daemon.base.owned_folders import OwnedFolder
folder = OwnedFolder(Path(sys.argv[1]))
assert folder.claim()
folder.folder.mkdir()
(folder.folder / "layer").write_bytes(b"x")
print("claimed", flush=True)
sys.stdin.read()
"""


def test_the_folder_of_a_killed_process_goes_and_that_of_a_living_one_stays(tmp_path: Path) -> None:
    """SIGKILL for the owner, no sweeper left: the next process removes its folder, and no other."""
    folder = tmp_path / "headway-node"
    strange = tmp_path / "headway-of-an-older-release"
    strange.mkdir()
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"claimed\n"
        assert remove_ownerless(tmp_path) == []
        assert (folder / "layer").exists()
    finally:
        owner.kill()
        owner.communicate()
    assert remove_ownerless(tmp_path) == [folder]
    assert list(tmp_path.iterdir()) == [strange]


def test_a_claim_holds_until_it_is_released(tmp_path: Path) -> None:
    """Claimed, it is not removed, though nothing is in it yet; released, nothing of it lies there."""
    mine = OwnedFolder(tmp_path / "headway-mine")
    assert mine.claim()
    assert remove_ownerless(tmp_path) == []
    mine.release()
    mine.release()
    assert list(tmp_path.iterdir()) == []
    again = OwnedFolder(tmp_path / "headway-mine")
    assert again.claim()
    again.release()


def test_a_link_in_place_of_a_folder_is_not_followed(tmp_path: Path) -> None:
    """Somebody put a link beside the owner's file: what it leads to stays."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    (tmp_path / "headway-x").symlink_to(precious)
    (tmp_path / "headway-x.owner").touch()
    remove_ownerless(tmp_path)
    assert (precious / "file").exists()
