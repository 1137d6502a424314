"""When a certificate is due, and who gets the next one."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from headway.daemon.cluster.cluster_records import IssuedRecord
from headway.daemon.net.certificates import CertificateAuthority
from headway.daemon.net.invitation import RefusedError, check_renewal
from headway.daemon.net.renewals import due_at

NOW = datetime.now(UTC)
FIRST = IssuedRecord(name="n", role="node", serial="A", issued_at=0.0, expires_at=NOW.timestamp() + 60, valid_s=60.0)
SECOND = replace(FIRST, serial="B", key_sha256="k", renews="A")


def may(issued: IssuedRecord | None, serial: str, key: str = "other", **more: object) -> str:
    """Why not; empty: it may."""
    rest = {"name": "n", "is_revoked": False, "now": NOW.timestamp()} | more
    try:
        check_renewal(issued, serial, key, **rest)  # type: ignore[arg-type]
    except RefusedError as error:
        return error.reason
    return ""


def test_it_is_due_when_a_third_is_left(tmp_path: Path) -> None:
    """Of the life since it was made, not since the earlier moment that allows for clocks; and nodes spread a little."""
    authority = CertificateAuthority.create(tmp_path / "ca")
    pem = (authority.issue("n", validity=timedelta(days=30)) / "cert.pem").read_bytes()
    certificate = x509.load_pem_x509_certificate(pem)
    left_days = (certificate.not_valid_after_utc.timestamp() - due_at(certificate)) / 86400
    assert left_days == pytest.approx(10.0)
    assert due_at(certificate, spread=1.0) - due_at(certificate) == pytest.approx(86400.0)


def test_the_newest_certificate_is_renewed_and_an_older_one_only_with_the_key_that_was_noted() -> None:
    """The holder of the first asks again after a lost answer, with the same new key."""
    assert may(FIRST, "A") == ""
    assert may(SECOND, "B") == ""
    assert may(SECOND, "A", "k") == ""
    for serial, key in (("A", "other"), ("A", ""), ("C", "k"), ("", "")):
        assert "newer certificate" in may(SECOND, serial, key)


def test_who_is_revoked_late_or_was_never_invited_is_told_so() -> None:
    """Each with what to do."""
    assert "certs restore n" in may(FIRST, "A", is_revoked=True)
    assert "invite it again" in may(FIRST, "A", now=NOW.timestamp() + 60.0)
    assert "headway certs" in may(None, "A")
