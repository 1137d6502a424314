"""A certificate authority in a folder: for the life of a local cluster, or for people who set up their own.

Keys are elliptic (P-256), so that one is made in a millisecond. A certificate bears its node's name, which is what
peers check (stages/sockets/tls_identity.py), and serves both ends of a connection: every Headway process is both.
"""

import hmac
import ipaddress
import os
import shutil
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from headway.daemon.base.addresses import LOCAL_HOSTS
from headway.daemon.base.errors import ConfigError
from headway.stages.durable import make_durable
from headway.stages.sockets.roles import ROLE_URI, Role, holder, roles_among, without_roles
from headway.stages.sockets.tls_identity import CA_FILE, CERTIFICATE_FILE, KEY_FILE, TlsIdentity

CA_KEY_FILE = "ca-key.pem"
NEXT_KEY_FILE = "next-ca-key.pem"
OLD_KEY_FILE = "old-ca-key.pem"
"""While one authority follows another (authority_change.py)."""
THROW_AWAY_VALIDITY = timedelta(days=30)
KEPT_VALIDITY = timedelta(days=3650)
CLOCK_SKEW = timedelta(hours=1)


class CertificateAuthority:
    """Signs certificates with the key in its folder. The folder is 0700, its keys are 0600."""

    def __init__(
        self,
        directory: Path,
        certificate: x509.Certificate,
        key: ec.EllipticCurvePrivateKey,
        *,
        trusted: bytes = b"",
        other_keys: Iterable[ec.EllipticCurvePrivateKey] = (),
    ) -> None:
        """trusted: certificates in PEM of this authority, and of the one before or after it; empty: of this one alone.

        other_keys: theirs.
        """
        self.directory = directory
        self.certificate = certificate
        self.trusted = trusted or certificate_pem(certificate)
        self._key = key
        self._other_keys = tuple(other_keys)

    @classmethod
    def create(cls, directory: Path, *, validity: timedelta = THROW_AWAY_VALIDITY) -> Self:
        """Make an authority in a folder, which is made if needed. Raises ConfigError when the folder already
        has one.
        """
        if (directory / CA_KEY_FILE).exists():
            raise ConfigError("has a certificate authority already; take another folder or delete it", str(directory))
        make_private_directory(directory)
        certificate, key = new_authority(validity)
        write_whole(directory / CA_FILE, certificate_pem(certificate))
        write_whole(directory / CA_KEY_FILE, key_pem(key))  # last: once it is there, the authority is
        return cls(directory, certificate, key)

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Return the authority that `create` has made. Raises ConfigError when it is missing or unreadable."""
        try:
            trusted = (directory / CA_FILE).read_bytes()
            known = x509.load_pem_x509_certificates(trusted)
            key = serialization.load_pem_private_key((directory / CA_KEY_FILE).read_bytes(), password=None)
            others = [
                serialization.load_pem_private_key(path.read_bytes(), password=None)
                for path in (directory / NEXT_KEY_FILE, directory / OLD_KEY_FILE)
                if path.exists()
            ]
        except OSError as error:
            raise ConfigError(f"no certificate authority: {error.strerror}", str(error.filename)) from error
        except ValueError as error:
            raise ConfigError("no readable certificate authority", str(directory)) from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ConfigError("not an elliptic curve key", str(directory / CA_KEY_FILE))
        if (certificate := next((each for each in known if each.public_key() == key.public_key()), None)) is None:
            raise ConfigError(f"has no certificate of {CA_KEY_FILE}", str(directory / CA_FILE))
        other_keys = [other for other in others if isinstance(other, ec.EllipticCurvePrivateKey)]
        return cls(directory, certificate, key, trusted=trusted, other_keys=other_keys)

    @classmethod
    def kept_in(cls, directory: Path) -> Self:
        """Return the authority in a folder. The first call makes it, whole or not at all. Raises ConfigError."""
        if not directory.exists():
            draft = directory.with_name(f"{directory.name}.part")
            shutil.rmtree(draft, ignore_errors=True)
            cls.create(draft, validity=KEPT_VALIDITY)
            draft.rename(directory)
        return cls.open(directory)

    def issuing_into(self, directory: Path) -> Self:
        """Return the same authority with another folder for what it issues."""
        return type(self)(directory, self.certificate, self._key, trusted=self.trusted, other_keys=self._other_keys)

    def issue(
        self, name: str, *, hosts: Iterable[str] = (), role: Role | None = None, validity: timedelta | None = None
    ) -> Path:
        """Make a certificate for a node, a server or a person: a folder with ca.pem, cert.pem and key.pem.

        hosts: names and addresses in addition to the name itself and the loopback. role: what its holder may be; None:
        a node and an operator. An older certificate of the name is replaced. Raises ConfigError for a name that cannot
        be a folder's or that every certificate bears.
        """
        if not name or name in {".", "..", *LOCAL_HOSTS} or set(name) & set("/\0:"):
            raise ConfigError(f"{name!r} cannot be the name of a certificate", str(self.directory))
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self.certify(key.public_key(), name, hosts=hosts, role=role, validity=validity)
        directory = self.directory / name
        make_private_directory(directory)
        write_private(directory / KEY_FILE, key_pem(key))
        write_private(directory / CERTIFICATE_FILE, certificate_pem(certificate))
        write_private(directory / CA_FILE, self.trusted)
        return directory

    def certify(
        self,
        public_key: ec.EllipticCurvePublicKey,
        name: str,
        *,
        hosts: Iterable[str] = (),
        role: str | None = None,
        validity: timedelta | None = None,
        now: datetime | None = None,
    ) -> x509.Certificate:
        """Return a certificate for a key, as in `issue`. It is never valid for longer than the authority's own.

        now: by this machine's clock if None; it is valid from CLOCK_SKEW earlier on.
        """
        now = now or datetime.now(UTC)
        last = self.certificate.not_valid_after_utc
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
        names = dict.fromkeys([name, *hosts, *LOCAL_HOSTS])
        role_names = [] if role is None else [x509.UniformResourceIdentifier(f"{ROLE_URI}{role}")]
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        authority_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        until = last if validity is None else min(last, now + validity)
        return (
            _builder(subject, self.certificate.subject, public_key, now=now, until=until)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(is_authority=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(x509.SubjectAlternativeName([*map(general_name, names), *role_names]), critical=False)
            .add_extension(authority_key, critical=False)
            .sign(self._key, hashes.SHA256())
        )

    def certify_again(
        self, certificate: x509.Certificate, public_key: ec.EllipticCurvePublicKey, *, now: datetime
    ) -> x509.Certificate:
        """Return a certificate for another key, with the names, the role and the life of one that was issued."""
        name, hosts = holder_of(certificate), without_roles(names_in(certificate))
        role = next((told.removeprefix(ROLE_URI) for told in names_in(certificate) if told.startswith(ROLE_URI)), None)
        life = certificate.not_valid_after_utc - certificate.not_valid_before_utc - CLOCK_SKEW
        return self.certify(public_key, name, hosts=hosts, role=role, validity=life, now=now)

    @property
    def has_untrusted_key(self) -> bool:
        """Return whether the key of the authority before or after this one is here, and nobody is told to trust it."""
        return any(key.public_key() not in self._known(self.trusted) for key in self._other_keys)

    def derived_keys(self, purpose: bytes, *, trusted: bytes) -> tuple[bytes, ...]:
        """Return secrets that only those know who have the authority's key: its own, and that of the authority before
        or after it, as long as that is among the certificates in PEM that are trusted.
        """
        known = self._known(trusted)
        others = [key for key in self._other_keys if key.public_key() in known]
        return tuple(hmac.digest(key_pem(key), purpose, "sha256") for key in (self._key, *others))

    @staticmethod
    def _known(trusted: bytes) -> list[object]:
        """Return the public keys of certificates in PEM; none of a damaged file."""
        try:
            return [each.public_key() for each in x509.load_pem_x509_certificates(trusted)]
        except ValueError:
            return []

    def delete(self) -> None:
        """Delete the folder with everything in it. Idempotent."""
        if self.directory.exists():
            shutil.rmtree(self.directory)


def new_authority(validity: timedelta) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Return the certificate of a new authority, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "headway authority")])
    now = datetime.now(UTC)
    certificate = (
        _builder(name, name, key.public_key(), now=now, until=now + validity)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(is_authority=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return certificate, key


def issuer_of(certificate: x509.Certificate, trusted: bytes) -> x509.Certificate | None:
    """Return the authority that has issued a certificate, among those of a PEM file; None: none of them, or the file
    cannot be read.
    """
    try:
        authorities = x509.load_pem_x509_certificates(trusted)
    except ValueError:
        return None
    return next((authority for authority in authorities if is_issued_by(certificate, authority)), None)


def is_issued_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    """Return whether an authority's key has signed a certificate."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def fingerprint(authority: x509.Certificate) -> str:
    """Return what tells one authority from another, in hexadecimal digits."""
    return authority.fingerprint(hashes.SHA256()).hex()


def certificate_ends(identity: TlsIdentity) -> dict[str, float]:
    """Return the ends of a `node`'s certificate and of the `authority` that signed it, in seconds since the epoch."""
    own = read_certificate(identity.certificate, CERTIFICATE_FILE)
    found = {"node": own, "authority": issuer_of(own, identity.ca)}
    return {whose: each.not_valid_after_utc.timestamp() for whose, each in found.items() if each is not None}


def names_in(certificate: x509.Certificate) -> tuple[str, ...]:
    """Return the names and addresses in a certificate, and the role."""
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return (
        *found.get_values_for_type(x509.DNSName),
        *(str(address) for address in found.get_values_for_type(x509.IPAddress)),
        *found.get_values_for_type(x509.UniformResourceIdentifier),
    )


def holder_of(certificate: x509.Certificate) -> str:
    """Return the name of whom a certificate was issued to, among those that it bears; empty: it does not tell."""
    common = [str(told.value) for told in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    return next((name for name in own_names(names_in(certificate)) if [name[:64]] == common), "")


def own_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names that tell one certificate from another: no role, and none that every certificate bears."""
    return tuple(name for name in without_roles(names) if name not in LOCAL_HOSTS)


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey, *, now: datetime, until: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(until)
    )


def _key_usage(*, is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def general_name(host: str) -> x509.GeneralName:
    """Return a host as it stands in a certificate. Raises ConfigError."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass  # a name, then
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise ConfigError(f"{host!r} is neither a host name in ASCII nor an address", "certificate") from error


def make_private_directory(directory: Path) -> None:
    """Make a folder that no other user may open. Raises ConfigError.

    One that is there and has something in it keeps its mode: others may need it, as they do `/`.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not any(directory.iterdir()):
            directory.chmod(0o700)
    except OSError as error:
        raise ConfigError(f"cannot be made: {error.strerror}; name another folder", str(directory)) from error


def write_private(path: Path, content: bytes) -> None:
    """Write a file that no other user may read, not even while it is being written."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def write_whole(path: Path, content: bytes) -> None:
    """Write a private file or nothing of it: the process may be killed at any time, and the machine lose its power."""
    part = path.with_name(f"{path.name}.part")
    write_private(part, content)
    make_durable(part)
    part.replace(path)


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a private key as PEM, without a password."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def certificate_pem(certificate: x509.Certificate) -> bytes:
    """Return a certificate as PEM."""
    return certificate.public_bytes(serialization.Encoding.PEM)


NEAR: Final = timedelta(days=14)
_CLIENTS, _SERVERS = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH
_PURPOSES: Final = {_CLIENTS: "clients (clientAuth)", _SERVERS: "servers (serverAuth)"}


def read_certificate(pem: bytes, where: str) -> x509.Certificate:
    """Return the first certificate of a PEM file. Raises ConfigError, naming the file."""
    try:
        found = x509.load_pem_x509_certificate(pem)
        _ = found.extensions  # the library reads them when it is asked
    except Exception as error:  # and it raises errors of many kinds
        raise ConfigError("is not a certificate in PEM", where) from error
    return found


def check_own_certificate(
    certificate: x509.Certificate, where: str, *, serves: bool, now: datetime | None = None
) -> None:
    """Raise ConfigError, naming the file and what to do, for a certificate that every peer refuses.

    serves: whether this side also listens. now: by this machine's clock if None.
    """
    check_dates(certificate, where, now=now or datetime.now(UTC))
    try:
        allowed = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return  # an absent extension allows every purpose
    for purpose in (_CLIENTS, _SERVERS) if serves else (_CLIENTS,):
        if purpose not in allowed:
            what = f"may not be used by {_PURPOSES[purpose]}: make one that may with `headway certs`"
            raise ConfigError(what, where)


def check_own_key(certificate: x509.Certificate, key: bytes, folder: Path) -> None:
    """Raise ConfigError, naming the file, unless a folder's key is that of its certificate."""
    try:
        found = load_pem_private_key(key, password=None)
    except (ValueError, TypeError) as error:
        raise ConfigError("is not a private key in PEM", str(folder / KEY_FILE)) from error
    if found.public_key() != certificate.public_key():
        raise ConfigError(f"is not the key of {CERTIFICATE_FILE}", str(folder / KEY_FILE))


def end_of(certificate: x509.Certificate, where: str, *, now: datetime) -> str:
    """Return a line about the end of a person's certificate, if that is near; empty: it is not, or a daemon renews it.

    Near means two weeks, or the last third of a short life.
    """
    if roles_among(names_in(certificate)) == {Role.NODE}:
        return ""
    first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if last - now > min(NEAR, (last - first) / 3):
        return ""
    return f"{where}: ends on {_date(last)}: `headway certs renew` gets the next one"


def why_no_operator(identity: TlsIdentity | None, folder: Path | None) -> str:
    """Return why this side may change nothing in its cluster, and what to do; empty: it may, or has no certificate."""
    if identity is None or folder is None:
        return ""
    where = folder / CERTIFICATE_FILE
    names = names_in(read_certificate(identity.certificate, str(where)))
    if Role.OPERATOR in roles_among(names):
        return ""
    told = "only an operator may change anything: `headway certs` makes a certificate of one with --operator"
    return f"{where}: is of {holder(names)}, and {told}"


def check_dates(certificate: x509.Certificate, where: str, *, now: datetime) -> None:
    """Raise ConfigError for a certificate that is not yet or no longer valid at `now`."""
    told = f"this machine's clock says {_date(now)}"
    if now < certificate.not_valid_before_utc:
        first = _date(certificate.not_valid_before_utc)
        raise ConfigError(f"is valid from {first} on, and {told}: set the clock, or make a new certificate", where)
    if now > certificate.not_valid_after_utc:
        last = _date(certificate.not_valid_after_utc)
        raise ConfigError(f"expired on {last}, and {told}: make a new certificate, or set the clock", where)


def _date(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M} UTC"


def begin_rotation(directory: Path) -> CertificateAuthority:
    """Make the next authority, and trust both. Raises ConfigError while another change is going on."""
    authority = CertificateAuthority.open(directory)
    if (directory / OLD_KEY_FILE).exists():
        raise ConfigError("one change is going on: end it with --drop before the next one begins", str(directory))
    if (directory / NEXT_KEY_FILE).exists() and authority.trusted != certificate_pem(authority.certificate):
        raise ConfigError("the next authority is there already: once everybody has its ca.pem, --sign", str(directory))
    certificate, key = new_authority(KEPT_VALIDITY)
    _write(directory / NEXT_KEY_FILE, key_pem(key))
    _trust_everywhere(directory, certificate_pem(authority.certificate) + certificate_pem(certificate))
    return CertificateAuthority.open(directory)


def sign_rotation(directory: Path) -> CertificateAuthority:
    """Let the next authority sign from now on. Raises ConfigError unless `begin_rotation` was done."""
    authority = CertificateAuthority.open(directory)
    if not (directory / NEXT_KEY_FILE).exists() or authority.has_untrusted_key:
        raise ConfigError("there is no next authority: `headway certs rotate` makes it", str(directory))
    _write(directory / OLD_KEY_FILE, (directory / CA_KEY_FILE).read_bytes())
    (directory / NEXT_KEY_FILE).replace(directory / CA_KEY_FILE)
    return CertificateAuthority.open(directory)


def drop_rotation(directory: Path) -> CertificateAuthority:
    """Trust the authority that signs alone. Raises ConfigError before `sign_rotation`."""
    authority = CertificateAuthority.open(directory)
    if (directory / NEXT_KEY_FILE).exists():
        raise ConfigError("the next authority does not sign yet: --sign before --drop", str(directory))
    if not (directory / OLD_KEY_FILE).exists():
        raise ConfigError("there is one authority alone: nothing to drop", str(directory))
    _trust_everywhere(directory, certificate_pem(authority.certificate))
    (directory / OLD_KEY_FILE).unlink()
    return CertificateAuthority.open(directory)


def _trust_everywhere(directory: Path, pem: bytes) -> None:
    """Write ca.pem everywhere, and last in the authority's folder: until then the step may be repeated."""
    for folder in (*sorted(path.parent for path in directory.glob(f"*/{CERTIFICATE_FILE}")), directory):
        _write(folder / CA_FILE, pem)


def _write(path: Path, content: bytes) -> None:
    """Write the whole file or nothing of it: a daemon may read it at any time."""
    try:
        write_whole(path, content)
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}; then run the same line again", str(path)) from error
