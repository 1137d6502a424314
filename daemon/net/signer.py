"""The daemon with the authority: it invites for operators, signs for those who were invited, and renews for them.

What it checks is in invitation.py. etcd has the invitations, so any daemon with the same authority may sign. One
transaction binds the invitation to the machine's key and notes the certificate, before that leaves this process: if the
answer is lost, the same key may ask again.
"""

import hashlib
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Final, TypeVar

import structlog
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from headway.daemon.base.addresses import LOCAL_HOSTS, is_node_name
from headway.daemon.base.errors import ConfigError, ConflictError, LeaseLostError
from headway.daemon.cluster.client import EtcdClient
from headway.daemon.cluster.cluster_records import InvitationRecord, IssuedRecord
from headway.daemon.cluster.format import UnreadableRecordError, decode, encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.transaction import Compare, Put
from headway.daemon.net.certificates import (
    CA_KEY_FILE,
    CertificateAuthority,
    certificate_pem,
    fingerprint,
    general_name,
    holder_of,
    issuer_of,
)
from headway.daemon.net.invitation import (
    NO_INVITATION,
    RefusedError,
    check_free,
    check_key,
    check_names,
    check_renewal,
    check_secret,
    checked,
    sealed,
)
from headway.daemon.net.join_token import SECRET_BYTES, SIGNER_NAME, AskCertificate, JoinAnswer
from headway.daemon.net.signing_request import read_signing_request
from headway.stages.sockets.roles import ROLE_URI
from headway.stages.sockets.tls_identity import CA_FILE

log = structlog.get_logger()

SEAL_PURPOSE: Final = b"headway invitations"
RecordT = TypeVar("RecordT")


def open_authority(folder: Path, ca: bytes) -> CertificateAuthority:
    """Return the authority in a folder. Raises ConfigError unless it is among those of `ca`, and its key is private."""
    authority = CertificateAuthority.open(folder)
    if fingerprint(authority.certificate) not in map(fingerprint, x509.load_pem_x509_certificates(ca)):
        raise ConfigError(f"is not the authority in this node's {CA_FILE}", str(folder))
    if (mode := (folder / CA_KEY_FILE).stat().st_mode & 0o077) != 0:
        raise ConfigError(f"others may open it (mode {mode:04o} of them): chmod 600", str(folder / CA_KEY_FILE))
    return authority


class Signer:
    """For one event loop."""

    def __init__(
        self,
        authority: CertificateAuthority,
        etcd: EtcdClient,
        *,
        is_member: Callable[[str], bool],
        trusted: Callable[[], bytes] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """is_member: whether a living node has a name, in any case. trusted: what this node trusts, which a new machine
        shall trust too, in PEM; None: what the authority's folder says.
        """
        self._authority = authority
        self._etcd = etcd
        self._is_member = is_member
        self._trusted = trusted or (lambda: authority.trusted)
        self._clock = clock

    @property
    def ca_sha256(self) -> bytes:
        """Return the digest by which a new machine knows the authority."""
        return self._authority.certificate.fingerprint(hashes.SHA256())

    @property
    def ca(self) -> str:
        """Return what a new machine trusts, in PEM: the authority, and the one before or after it."""
        return self._trusted().decode()

    async def invite(self, wish: InvitationRecord, *, lasts_s: float, again: bool = False) -> bytes:
        """Let somebody join once; return the secret. An earlier invitation of the name ends.

        wish: without secret, expiry and seal, with the names of who asks. again: although the name has a certificate,
        which stays valid. Raises RefusedError.
        """
        now, secret = self._clock(), secrets.token_bytes(SECRET_BYTES)
        _check_hosts(checked(wish, lasts_s=lasts_s))
        await self._check_others(wish)
        issued, _, _ = await self._read(Keys.issued(wish.name), IssuedRecord)
        replaces = issued.serial if again and issued is not None else ""
        check_free(
            wish.name,
            issued,
            is_member=self._is_member(wish.name),
            now=now,
            replaces=replaces,
            is_revoked=await self._is_revoked(wish.name),
        )
        digest = hashlib.sha256(secret).hexdigest()
        invitation = replace(wish, secret_sha256=digest, expires_at=now + lasts_s, replaces=replaces)
        lease_id = await self._etcd.grant_passing_lease(math.ceil(lasts_s))
        await self._etcd.put(Keys.invitation(wish.name), self._written(invitation), lease_id=lease_id)
        log.info("invited", name=wish.name, role=wish.role, lasts_s=lasts_s)
        return secret

    async def join(self, asked: AskCertificate) -> JoinAnswer:
        """Return a certificate for somebody who was invited, or who asks again with the same key.

        Raises RefusedError; then the invitation stands.
        """
        now = self._clock()
        if not is_node_name(asked.name):
            raise RefusedError(NO_INVITATION)
        invitation, invited_at, lease_id = await self._read(Keys.invitation(asked.name), InvitationRecord)
        check_secret(invitation, asked.secret, seal_keys=self._seal_keys, now=now)
        assert invitation is not None
        key, names = read_signing_request(asked.request)
        name, role, digest = invitation.name, invitation.role, _digest(key)
        check_names(name, role, names, role_uri=ROLE_URI)
        issued, issued_at, _ = await self._read(Keys.issued(name), IssuedRecord)
        check_key(invitation, issued, digest)
        check_free(
            name,
            issued,
            is_member=self._is_member(name),
            now=now,
            replaces=issued.serial if invitation.key_sha256 and issued is not None else invitation.replaces,
            is_revoked=await self._is_revoked(name),
        )
        certificate = self._authority.certify(
            key,
            name,
            hosts=invitation.hosts,
            role=role,
            validity=timedelta(seconds=invitation.valid_s),
            now=datetime.fromtimestamp(now, UTC),
        )
        record = _issued(certificate, name, role, digest, now)
        used = self._written(replace(invitation, key_sha256=digest))
        unchanged = [
            Compare.unchanged(Keys.invitation(name), invited_at),
            Compare.unchanged(Keys.issued(name), issued_at),
            # Nor does an invitation outlive its operator: a thief may have made it in time.
            *(Compare.absent(Keys.revoked(each)) for each in (name, *invitation.invited_by)),
        ]
        try:
            await self._etcd.transaction(
                unchanged,
                [
                    Put(Keys.invitation(name), used, lease_id),
                    Put(Keys.issued(name), encode(record)),
                ],
            )
        except (ConflictError, LeaseLostError) as error:
            raise RefusedError(NO_INVITATION) from error
        log.info("joined", name=name, role=role, serial=record.serial)
        return JoinAnswer(
            certificate=certificate_pem(certificate).decode(), role=role, etcd=invitation.etcd, authority=self.ca
        )

    async def renew(self, shown: bytes, request: str) -> str:
        """Return the next certificate for the holder of one, in PEM. Raises RefusedError.

        shown: its present one in PEM, whose key it has proven in TLS. request: PEM of PKCS #10, with another key. The
        next one bears what the present one does, whatever names are in the request.
        """
        now = datetime.fromtimestamp(self._clock(), UTC)
        key, _ = read_signing_request(request)
        present, name = self._shown(shown)
        serial, digest = f"{present.serial_number:X}", _digest(key)
        issued, issued_at, _ = await self._read(Keys.issued(name), IssuedRecord)
        is_revoked = await self._is_revoked(name)
        issued = check_renewal(issued, serial, digest, name=name, is_revoked=is_revoked, now=now.timestamp())
        certificate = self._authority.certify_again(present, key, now=now)
        renews = serial if serial == issued.serial else issued.renews
        record = _issued(certificate, name, issued.role, digest, now.timestamp(), renews=renews)
        unchanged = [Compare.unchanged(Keys.issued(name), issued_at), Compare.absent(Keys.revoked(name))]
        try:
            await self._etcd.transaction(unchanged, [Put(Keys.issued(name), encode(record))])
        except ConflictError as error:
            raise RefusedError("something changed meanwhile: ask again") from error
        log.info("renewed", name=name, role=record.role, serial=record.serial)
        return certificate_pem(certificate).decode()

    def _shown(self, pem: bytes) -> tuple[x509.Certificate, str]:
        """Return a caller's certificate, and its holder's name. Raises RefusedError."""
        try:
            certificate = x509.load_pem_x509_certificate(pem)
            name = holder_of(certificate)
        except ValueError as error:
            raise RefusedError("the certificate is not of this authority") from error
        if issuer_of(certificate, self._trusted()) is None:
            raise RefusedError("the certificate is not of this authority")
        if not is_node_name(name):
            raise RefusedError("the certificate bears no name")
        return certificate, name

    async def _check_others(self, wish: InvitationRecord) -> None:
        """Raise RefusedError for a host that is another holder's name: peers would take it for that one."""
        for host in wish.hosts:
            if host.casefold() == wish.name.casefold():
                continue
            if self._is_member(host) or await self._etcd.get(Keys.issued(host)) is not None:
                raise RefusedError(f"{host} is the name of another certificate: leave it out of the hosts")

    @property
    def _seal_keys(self) -> tuple[bytes, ...]:
        """The first one seals. What the authority before this one has sealed is true as well, while that is trusted."""
        return self._authority.derived_keys(SEAL_PURPOSE, trusted=self._trusted())

    def _written(self, invitation: InvitationRecord) -> bytes:
        return encode(sealed(invitation, self._seal_keys[0]))

    async def _is_revoked(self, name: str) -> bool:
        return await self._etcd.get(Keys.revoked(name)) is not None

    async def _read(self, key: str, kind: type[RecordT]) -> tuple[RecordT | None, int, int]:
        """Return a record, the revision of its last change, and its lease; None for what is absent or unreadable."""
        entry = await self._etcd.get(key)
        if entry is None:
            return None, 0, 0
        try:
            return decode(entry.value, kind), entry.mod_revision, entry.lease_id
        except UnreadableRecordError as error:
            log.warning("record_not_read", key=key, error=str(error))
            return None, entry.mod_revision, entry.lease_id


def _check_hosts(wish: InvitationRecord) -> None:
    """Raise RefusedError for names that no certificate may bear, or that every one bears."""
    for name in (wish.name, *wish.hosts):
        if name.casefold() in (*LOCAL_HOSTS, SIGNER_NAME):
            raise RefusedError(f"{name} cannot be a name in a certificate of its own")
        # Nothing that stands for several names, as `*.example`, or says a role.
        if not is_node_name(name) and not _is_address(name):
            raise RefusedError(f"{name!r} is neither a host's name in ASCII nor an address")
        try:
            general_name(name)
        except ConfigError as error:
            raise RefusedError(error.what) from error


def _digest(key: ec.EllipticCurvePublicKey) -> str:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(key.public_bytes(serialization.Encoding.DER, form)).hexdigest()


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _issued(
    certificate: x509.Certificate, name: str, role: str, key_sha256: str, now: float, *, renews: str = ""
) -> IssuedRecord:
    return IssuedRecord(
        name=name,
        role=role,
        serial=f"{certificate.serial_number:X}",
        issued_at=now,
        expires_at=certificate.not_valid_after_utc.timestamp(),
        key_sha256=key_sha256,
        renews=renews,
    )
