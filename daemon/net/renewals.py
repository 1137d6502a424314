"""Renews the certificate of a daemon or a relay while it runs, and keeps the renewed one.

The certificate and its key change in one step, with the link `newest` in the folder of renewals. A process that dies
before leaves the old pair, and the new key: the next attempt asks with the same key, so that no answer is lost.
"""

import asyncio
import random
import shutil
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import structlog
from cryptography import x509

from headway.daemon.base.addresses import NodeEndpoint
from headway.daemon.base.errors import ConfigError
from headway.daemon.base.fault_points import fault_point
from headway.daemon.blobs.peer_client import NodeClient
from headway.daemon.cluster.records import NodeRecord
from headway.daemon.decide.cluster_watch import ClusterWatch
from headway.daemon.net.certificates import (
    CLOCK_SKEW,
    fingerprint,
    issuer_of,
    key_pem,
    make_private_directory,
    names_in,
    read_certificate,
    write_private,
)
from headway.daemon.net.signing_request import next_key, signing_request
from headway.stages.durable import make_durable
from headway.stages.errors import PeerError, UnavailableError
from headway.stages.sockets.tls_identity import CA_FILE, CERTIFICATE_FILE, KEY_FILE, NEWEST, Identity, is_borne

log = structlog.get_logger()

LEFT: Final = 1 / 3
"""Share of its life that a certificate still has when it is renewed."""
MOST_SPREAD: Final = 1 / 30
"""Share of a life by which nodes that joined together ask at other times."""
LOOKED_AT_EVERY_S: Final = 10.0
"""Longest sleep: a machine that was suspended renews soon after, and so do all when another authority signs."""
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 600.0
SOON_S: Final = 7 * 86400.0
"""A certificate that nobody renews is told of when it ends within this time."""


class Renewals:
    """For one process: a daemon, or a relay."""

    def __init__(
        self,
        cluster: ClusterWatch,
        identity: Identity,
        *,
        name: str,
        folder: Path,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """folder: of renewals. tell: says what keeps the certificate from being renewed; empty: nothing does."""
        self._cluster = cluster
        self._identity = identity
        self._name = name
        self._folder = folder
        self._tell = tell
        self._clock = clock
        self._spread = random.random()

    async def run(self) -> None:
        """Renew again and again, until cancelled."""
        pause_s = FIRST_PAUSE_S
        while not self._cluster.revision:  # nothing tells yet whether the certificate came by an invitation
            await self._cluster.changed(self._cluster.version)
        while True:
            certificate = x509.load_pem_x509_certificate(self._identity.now().certificate)
            is_followed = self._is_followed(certificate)
            wait_s = 0.0 if is_followed else due_at(certificate, spread=self._spread) - self._clock()
            if wait_s > 0:
                await asyncio.sleep(min(wait_s, LOOKED_AT_EVERY_S))
                continue
            if not self._is_renewable:
                is_soon = certificate.not_valid_after_utc.timestamp() - self._clock() < SOON_S
                why = "another authority signs now" if is_followed else _end(certificate) if is_soon else ""
                self._tell(f"{why}: make another certificate with `headway certs`" if why else "")
                await asyncio.sleep(LOOKED_AT_EVERY_S)
                continue
            try:
                await self._renew()
            except (PeerError, ConfigError, OSError) as error:
                log.warning("certificate_not_renewed", reason=str(error), **_times(certificate))
                self._tell(f"{_end(certificate)}, and cannot be renewed now: {error}")
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
                pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
            else:
                pause_s = FIRST_PAUSE_S
                self._tell("")

    def _is_followed(self, certificate: x509.Certificate) -> bool:
        """Return whether all daemons with the authority have another one than this certificate's, which this node
        trusts: the old one may soon be trusted no more.
        """
        nodes = self._cluster.view.nodes.values()
        signing = {node.authority for node in nodes if node.has_authority or node.authority}
        trusted = self._identity.now().ca
        # A daemon of an earlier release does not say which one it has, and may answer with the old one for ever.
        if not signing or "" in signing or (issuer := issuer_of(certificate, trusted)) is None:
            return False
        if fingerprint(issuer) in signing:
            return False
        return not signing.isdisjoint(map(fingerprint, x509.load_pem_x509_certificates(trusted)))

    @property
    def _is_renewable(self) -> bool:
        """Return whether the certificate came by an invitation: another one is its administrator's."""
        return self._name.casefold() in self._cluster.view.issued

    async def _renew(self) -> None:
        """Raises PeerError, ConfigError, OSError."""
        key = next_key(self._folder, self._identity.now().key)
        nodes = self._cluster.view.nodes.values()
        pem = await asked_of_authority(nodes, self._identity, signing_request(self._name, key))
        certificate = read_certificate(pem.encode(), "the authority's answer")
        if issuer_of(certificate, self._identity.now().ca) is None:
            what = f"is of an authority that is not in {CA_FILE}: copy that of the authority's folder here"
            raise ConfigError(what, "the authority's answer")
        if certificate.public_key() != key.public_key() or not is_borne(self._name, names_in(certificate)):
            raise ConfigError("is not for this node", "the authority's answer")
        fault_point("renewal.before_write", node=self._name)
        keep_renewed(self._folder, pem.encode(), key_pem(key), name=f"{certificate.serial_number:X}")
        log.info("certificate_renewed", **_times(certificate))


async def asked_of_authority(nodes: Iterable[NodeRecord], identity: Identity, request: str) -> str:
    """Return the first answer of a daemon with the authority. Raises PeerError, or ConfigError if there is none."""
    signers = [node for node in nodes if node.has_authority]
    if not signers:
        raise ConfigError("no daemon with the authority is in the cluster", "authority")
    random.shuffle(signers)
    client = NodeClient(identity)  # an open connection shows the certificate with which it was opened
    try:
        for signer in signers:
            try:
                return await client.renew(NodeEndpoint(signer.name, signer.address), request)
            except UnavailableError:
                if signer is signers[-1]:
                    raise
        raise AssertionError("there are no signers")
    finally:
        await client.close()


def keep_renewed(folder: Path, certificate: bytes, key: bytes, *, name: str) -> None:
    """Let a certificate with its key count from now on. Raises OSError; then the pair before still counts."""
    place, link = folder / name, folder / f"{NEWEST}.part"
    make_private_directory(place)
    write_private(place / CERTIFICATE_FILE, certificate)
    write_private(place / KEY_FILE, key)
    for written in (place / CERTIFICATE_FILE, place / KEY_FILE, place):
        make_durable(written)  # a link to files that a power cut empties would leave the node without a certificate
    link.unlink(missing_ok=True)
    link.symlink_to(name)
    fault_point("renewal.before_link", folder=str(folder))
    before = _newest(folder)
    link.replace(folder / NEWEST)
    for old in folder.iterdir():  # the pair before stays, because somebody may be reading it
        if old.is_dir() and not old.is_symlink() and old.name not in (name, before):
            shutil.rmtree(old, ignore_errors=True)


def forget_renewed(folder: Path) -> None:
    """Let the certificate that the settings name count again."""
    (folder / NEWEST).unlink(missing_ok=True)


def _newest(folder: Path) -> str:
    try:
        return str((folder / NEWEST).readlink())
    except OSError:
        return ""


def due_at(certificate: x509.Certificate, *, spread: float = 0.0) -> float:
    """Return when to renew a certificate, in seconds since 1970. spread: this node's place from 0 to 1 among others."""
    first, last = certificate.not_valid_before_utc + CLOCK_SKEW, certificate.not_valid_after_utc
    life = max(last - first, timedelta())
    return (last - life * (LEFT - MOST_SPREAD * spread)).timestamp()


def _end(certificate: x509.Certificate) -> str:
    return f"this node's certificate ends on {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"


def _times(certificate: x509.Certificate) -> dict[str, object]:
    left_s = (certificate.not_valid_after_utc - datetime.now(UTC)).total_seconds()
    return {"until": certificate.not_valid_after_utc.isoformat(), "left_s": round(left_s)}
