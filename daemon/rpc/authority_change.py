"""One authority follows another, in three steps, each of which may be repeated.

Everybody trusts both first (`begin`), then the new one signs (`sign`), and at last nobody trusts the old one (`drop`).
ca.pem has the certificates of all that are trusted, and ca-key.pem is the key of the one that signs. The folders of
those for whom the authority has made certificates lie inside, so their ca.pem changes too.
"""

from pathlib import Path

from headway.daemon.errors import ConfigError
from headway.daemon.rpc.certificates import (
    CA_KEY_FILE,
    KEPT_VALIDITY,
    NEXT_KEY_FILE,
    OLD_KEY_FILE,
    CertificateAuthority,
    certificate_pem,
    key_pem,
    new_authority,
    write_whole,
)
from headway.stages.sockets.tls_identity import CA_FILE, CERTIFICATE_FILE


def begin(directory: Path) -> CertificateAuthority:
    """Make the next authority, and trust both. Raises ConfigError while another change is going on."""
    authority = CertificateAuthority.open(directory)
    if (directory / OLD_KEY_FILE).exists():
        raise ConfigError("one change is going on: end it with --drop before the next one begins", str(directory))
    if (directory / NEXT_KEY_FILE).exists() and authority.trusted != certificate_pem(authority.certificate):
        raise ConfigError("the next authority is there already: once everybody has its ca.pem, --sign", str(directory))
    certificate, key = new_authority(KEPT_VALIDITY)
    _write(directory / NEXT_KEY_FILE, key_pem(key))
    _trust(directory, certificate_pem(authority.certificate) + certificate_pem(certificate))
    return CertificateAuthority.open(directory)


def sign(directory: Path) -> CertificateAuthority:
    """Let the next authority sign from now on. Raises ConfigError unless `begin` was done."""
    authority = CertificateAuthority.open(directory)
    if not (directory / NEXT_KEY_FILE).exists() or authority.has_untrusted_key:
        raise ConfigError("there is no next authority: `headway certs rotate` makes it", str(directory))
    _write(directory / OLD_KEY_FILE, (directory / CA_KEY_FILE).read_bytes())
    (directory / NEXT_KEY_FILE).replace(directory / CA_KEY_FILE)
    return CertificateAuthority.open(directory)


def drop(directory: Path) -> CertificateAuthority:
    """Trust the authority that signs alone. Raises ConfigError before `sign`."""
    authority = CertificateAuthority.open(directory)
    if (directory / NEXT_KEY_FILE).exists():
        raise ConfigError("the next authority does not sign yet: --sign before --drop", str(directory))
    if not (directory / OLD_KEY_FILE).exists():
        raise ConfigError("there is one authority alone: nothing to drop", str(directory))
    _trust(directory, certificate_pem(authority.certificate))
    (directory / OLD_KEY_FILE).unlink()
    return CertificateAuthority.open(directory)


def _trust(directory: Path, pem: bytes) -> None:
    """Write ca.pem everywhere, and last in the authority's folder: until then the step may be repeated."""
    for folder in (*sorted(path.parent for path in directory.glob(f"*/{CERTIFICATE_FILE}")), directory):
        _write(folder / CA_FILE, pem)


def _write(path: Path, content: bytes) -> None:
    """Write the whole file or nothing of it: a daemon may read it at any time."""
    try:
        write_whole(path, content)
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}; then run the same line again", str(path)) from error
