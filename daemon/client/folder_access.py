"""Asks nodes whether they can write to a job's checkpoint folder, before the job is submitted."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.errors import ConfigError, RecoveryError
from headway.daemon.jobs.checkpoint_place import is_store
from headway.daemon.rpc.peer_client import NodeClient
from headway.daemon.view.cluster_view import ClusterView
from headway.proto.control_pb2 import TryFolderReply
from headway.stages.errors import PeerError

MOST_NODES: Final = 16
"""Maximum number of nodes asked, the first by name; a job's own nodes try the folder anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderAccess:
    """The nodes' answers about one folder. All mappings are from node to reason."""

    checkpoint_dir: str
    num_able: int = 0
    lacking: Mapping[str, str] = field(default_factory=dict)
    """Nodes without credentials for the folder, or without the package that it needs."""
    away: Mapping[str, str] = field(default_factory=dict)
    """Nodes that cannot write to the folder now: another attempt may succeed."""
    silent: Mapping[str, str] = field(default_factory=dict)
    """Nodes that did not answer the question."""

    def check(self, where: str) -> None:
        """Raise ConfigError if every node lacks access. where: the key that names the folder."""
        if self.lacking and not (self.num_able or self.away or self.silent):
            node, reason = min(self.lacking.items())
            raise ConfigError(
                f"no node has access to {self.checkpoint_dir}, among them {node}: {reason}; give the daemons what is "
                "missing, or name another folder",
                where,
            )

    @property
    def warnings(self) -> list[str]:
        """Return one sentence for each problem that a job on these nodes has to expect."""
        folder = self.checkpoint_dir
        lines = [f"{node} has no access to {folder}: {reason}" for node, reason in sorted(self.lacking.items())]
        if self.away:
            node, reason = min(self.away.items())
            lines.append(f"{node} cannot write to {folder} now: {reason}; the job trains, and its checkpoints wait")
        if self.silent and not (self.num_able or self.lacking or self.away):
            node, reason = min(self.silent.items())
            lines.append(f"no node could be asked whether it can write to {folder}: {reason}")
        return lines


async def folder_access(session: ClusterSession, view: ClusterView, checkpoint_dir: str) -> FolderAccess:
    """Return the nodes' answers; empty if the folder is in no store, or no node can be asked."""
    names = sorted(view.nodes)[:MOST_NODES]
    if session.identity is None or not is_store(checkpoint_dir):
        return FolderAccess(checkpoint_dir=checkpoint_dir)
    client = NodeClient(session.identity)
    try:
        answers = await asyncio.gather(*(_ask(client, view, name, checkpoint_dir) for name in names))
    finally:
        await client.close()
    return sorted_out(checkpoint_dir, dict(zip(names, answers, strict=True)))


def sorted_out(checkpoint_dir: str, answers: Mapping[str, TryFolderReply | str]) -> FolderAccess:
    """Sort the answers by their result. answers: each node's reply, or the reason why it sent none."""
    replies = {node: reply for node, reply in answers.items() if not isinstance(reply, str)}
    unable = {node: reply for node, reply in replies.items() if reply.reason}
    return FolderAccess(
        checkpoint_dir=checkpoint_dir,
        num_able=len(replies) - len(unable),
        lacking={node: reply.reason for node, reply in unable.items() if reply.lacks_access},
        away={node: reply.reason for node, reply in unable.items() if not reply.lacks_access},
        silent={node: reply for node, reply in answers.items() if isinstance(reply, str)},
    )


async def _ask(client: NodeClient, view: ClusterView, node: str, checkpoint_dir: str) -> TryFolderReply | str:
    try:
        return await client.try_folder(view.nodes[node].endpoint, checkpoint_dir)
    except (PeerError, RecoveryError) as error:
        return str(error)
