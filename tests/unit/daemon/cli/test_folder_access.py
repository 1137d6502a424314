"""`submit` evaluates the nodes' answers about a checkpoint folder."""

import pytest

from headway.daemon.client.checkpoint_folder import sorted_out
from headway.daemon.errors import ConfigError
from headway.proto.control_pb2 import TryFolderReply

URL = "s3://bucket/c"
FINE = TryFolderReply()
POOR = TryFolderReply(reason="this node has no credentials for it", lacks_access=True)
AWAY = TryFolderReply(reason="its server does not answer")


def test_a_folder_that_no_node_has_access_to_is_refused() -> None:
    """Both nodes lack credentials: one line with the key, the folder, a node and its reason."""
    with pytest.raises(ConfigError) as caught:
        sorted_out(URL, {"a": POOR, "b": POOR}).check("j.toml:fault.checkpoint_dir")
    assert str(caught.value) == (
        "j.toml:fault.checkpoint_dir: no node has access to s3://bucket/c, among them a: this node has no credentials "
        "for it; give the daemons what is missing, or name another folder"
    )


@pytest.mark.parametrize("other", [FINE, AWAY, "node b: no answer"])
def test_a_node_without_access_to_the_folder_is_named_in_a_warning(other: TryFolderReply | str) -> None:
    """The job is accepted, because another node can write, may write later, or could not be asked."""
    found = sorted_out(URL, {"a": POOR, "b": other})
    found.check("")
    assert found.warnings[0] == "a has no access to s3://bucket/c: this node has no credentials for it"


def test_an_outage_of_the_folder_gives_one_warning() -> None:
    """No node reaches the store now; the warning names the first of them."""
    found = sorted_out(URL, {"b": AWAY, "a": AWAY})
    found.check("")
    assert found.warnings == [
        "a cannot write to s3://bucket/c now: its server does not answer; the job trains, and its checkpoints wait"
    ]


def test_submit_warns_when_no_node_answers_about_the_folder() -> None:
    """One silent node of an older release does not matter."""
    assert sorted_out(URL, {"a": FINE, "b": "not implemented"}).warnings == []
    assert sorted_out(URL, {"a": "not implemented"}).warnings == [
        "no node could be asked whether it can write to s3://bucket/c: not implemented"
    ]
    assert sorted_out(URL, {}).warnings == []
