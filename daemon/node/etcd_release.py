"""Checks that a daemon may use the release of etcd that answers."""

import structlog

from headway.daemon.errors import ConfigError
from headway.daemon.etcd.releases import ADVICE, may_lose_commits, remark
from headway.daemon.node.config import NodeConfig
from headway.daemon.node.own_host import far_member

log = structlog.get_logger()


async def check_etcd_release(version: str, config: NodeConfig) -> None:
    """Raise ConfigError if etcd may lose commits and serves more than this machine, unless that is accepted."""
    if not may_lose_commits(version):
        return
    member = await far_member(config.etcd)
    if member is not None and not config.accept_faulty_etcd:
        raise ConfigError(
            f"etcd {version} at {member} may lose acknowledged writes when it is killed, such as the plan in force; "
            f"{ADVICE}, or set accept_faulty_etcd = true",
            "etcd",
        )
    log.warning("etcd_may_lose_commits", version=version, member=member or config.etcd[0], advice=remark(version))
