"""The folder of renewed certificates: the pair changes in one step, whatever ends the process in between."""

import asyncio
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography import x509

from headway.daemon.base.errors import ConfigError
from headway.daemon.net import renewals
from headway.daemon.net.certificates import CLOCK_SKEW, CertificateAuthority, certificate_pem, fingerprint, key_pem
from headway.daemon.net.renewals import Renewals, due_at, keep_renewed
from headway.daemon.net.signing_request import new_key
from headway.daemon.node.identity import read_identity
from headway.daemon.node.settings import NodeConfig
from headway.stages.sockets.tls_identity import RenewableIdentity, TlsIdentity
from tests.rigs.running import running


class Place:
    """A node's folders."""

    def __init__(self, folder: Path) -> None:
        self.authority = CertificateAuthority.create(folder / "ca")
        self.named = self.authority.issue("n", validity=timedelta(hours=1))
        self.config = NodeConfig(name="n", certificates=self.named, state_dir=folder / "state")
        self.folder = self.config.renewals_dir
        self.scratch = folder / "scratch"

    def renewed(self, name: str, *, authority: CertificateAuthority | None = None) -> TlsIdentity:
        """Keep another pair; return it."""
        pair = TlsIdentity.read((authority or self.authority).issuing_into(self.scratch / name).issue("n"))
        keep_renewed(self.folder, pair.certificate, pair.key, name=name)
        return pair


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A node whose certificate was never renewed."""
    return Place(tmp_path)


def test_a_running_process_finds_each_renewal(place: Place) -> None:
    """The same object as long as nothing changes; then key and certificate of one renewal, never a mixture."""
    identity = RenewableIdentity(place.named, place.folder)
    first = identity.now()
    assert (first, identity.now() is first) == (TlsIdentity.read(place.named), True)
    for name in ("A", "B", "C"):
        pair = place.renewed(name)
        found = identity.now()
        assert (found.certificate, found.key, found.ca) == (pair.certificate, pair.key, first.ca)
        assert identity.now() is found
    assert sorted(path.name for path in place.folder.iterdir()) == ["B", "C", "newest"], "one before is kept"


def test_a_running_process_trusts_what_its_folder_says_now(place: Place) -> None:
    """ca.pem gets a second authority, also half a file on the way; the certificate stays, and a renewal keeps both."""
    identity = RenewableIdentity(place.named, place.folder)
    first = identity.now()
    other = certificate_pem(CertificateAuthority.create(place.scratch / "other").certificate)
    (place.named / "ca.pem").write_bytes(first.ca + other[:300])
    assert identity.now() is first
    (place.named / "ca.pem").write_bytes(first.ca + other)
    both = identity.now()
    assert (both.ca, both.certificate, both.key) == (first.ca + other, first.certificate, first.key)
    pair = place.renewed("A")
    assert (identity.now().ca, identity.now().key) == (both.ca, pair.key)
    (place.named / "ca.pem").unlink()
    assert identity.now().ca == both.ca


async def test_a_certificate_is_renewed_when_another_authority_signs(place: Place) -> None:
    """Not before this node trusts it, and not while a daemon still signs with the old one, or does not say with which:
    an earlier release would answer at once with the old one, again and again.
    """
    await place_of_two_authorities(place, signing=("new",), trusts_both=True, asks=True)
    await place_of_two_authorities(place, signing=("new", "unsaid"), trusts_both=True, asks=False)
    await place_of_two_authorities(place, signing=("new",), trusts_both=False, asks=False)
    await place_of_two_authorities(place, signing=("old", "new"), trusts_both=True, asks=False)


async def place_of_two_authorities(place: Place, *, signing: tuple[str, ...], trusts_both: bool, asks: bool) -> None:
    """Whether a node with a fresh certificate of the old authority asks for another one."""
    other = CertificateAuthority.create(place.scratch / f"{signing}{trusts_both}").certificate
    known = {"old": place.authority.certificate, "new": other}
    own = certificate_pem(known["old"])
    (place.named / "ca.pem").write_bytes(own + certificate_pem(other) if trusts_both else own)
    told_of = {name: fingerprint(certificate) for name, certificate in known.items()} | {"unsaid": ""}
    nodes: Any = {
        name: SimpleNamespace(has_authority=name == "unsaid", authority=told_of[name]) for name in signing
    } | {"n": SimpleNamespace(has_authority=False, authority="")}
    cluster: Any = SimpleNamespace(view=SimpleNamespace(issued={"n": object()}, nodes=nodes), revision=7, version=0)
    asked = list[str]()

    async def ask(_nodes: object, _identity: object, request: str) -> str:
        asked.append(request)
        raise ConfigError("does not answer", "authority")

    identity = RenewableIdentity(place.named, place.folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(renewals, "asked_of_authority", ask)
        told = list[str]()
        running = asyncio.create_task(
            Renewals(cluster, identity, name="n", folder=place.folder, tell=told.append).run()
        )
        for _ in range(20):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait({running})
    assert (bool(asked), bool(told)) == (asks, asks)


def test_a_renewal_that_cannot_be_read_leaves_the_one_before(place: Place) -> None:
    """A file is gone: connections go on as they are."""
    identity = RenewableIdentity(place.named, place.folder)
    pair = place.renewed("A")
    assert identity.now().key == pair.key
    place.renewed("B")
    (place.folder / "B" / "key.pem").unlink()
    assert identity.now().key == pair.key


def test_a_process_that_dies_before_the_link_keeps_the_old_pair(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is written but the last step; the next start finds a whole pair, and a later renewal cleans up."""
    pair = place.renewed("A")

    def die(*_: object, **__: object) -> None:
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(renewals, "fault_point", die)
        with pytest.raises(SystemExit):
            place.renewed("B")
    assert read_identity(place.config)[0].now().key == pair.key
    last = place.renewed("C")
    assert read_identity(place.config)[0].now().key == last.key


def test_the_settings_folder_counts_again_when_it_is_newer_or_of_another_authority(place: Place) -> None:
    """An administrator invites the machine again, or sets the cluster up anew."""
    pair = place.renewed("A")
    assert read_identity(place.config)[0].now().key == pair.key
    future = datetime.now(UTC) + timedelta(minutes=1)
    key = new_key()
    again = place.authority.certify(key.public_key(), "n", now=future)
    (place.named / "cert.pem").write_bytes(certificate_pem(again))
    (place.named / "key.pem").write_bytes(key_pem(key))
    named = TlsIdentity.read(place.named)
    assert read_identity(place.config)[0].now().key == named.key
    other = CertificateAuthority.create(place.scratch / "other")
    place.renewed("B", authority=other)
    assert read_identity(place.config)[0].now().key == named.key
    assert not (place.folder / "newest").exists()


def test_a_renewed_certificate_counts_when_the_named_one_has_expired(place: Place) -> None:
    """And alone the named one is refused, with what to do."""
    place.authority.issue("n", validity=-CLOCK_SKEW / 2)
    with pytest.raises(ConfigError, match="expired on"):
        read_identity(place.config)
    pair = place.renewed("A")
    assert read_identity(place.config)[0].now().key == pair.key


async def test_nothing_is_decided_before_etcd_has_told_what_was_issued(place: Place) -> None:
    """A certificate that is due when the daemon starts: nobody is told to make another one by hand."""
    listed, told = asyncio.Event(), list[str]()
    view: Any = SimpleNamespace(issued={}, nodes={})

    async def changed(_: int) -> int:
        await listed.wait()
        return 1

    cluster: Any = SimpleNamespace(view=view, revision=0, version=0, changed=changed)
    identity = RenewableIdentity(place.named, place.folder)
    in_time = time.time() + 3590.0
    renewing = Renewals(cluster, identity, name="n", folder=place.folder, tell=told.append, clock=lambda: in_time)
    async with running(renewing.run()):
        await asyncio.sleep(0.05)
        assert told == []
        cluster.revision, view.issued = 7, {"n": object()}
        listed.set()
        async with asyncio.timeout(10.0):
            while not told:
                await asyncio.sleep(0.01)
    assert "make another one" not in told[0]
    assert "cannot be renewed now" in told[0], "it asks, and finds no daemon with the authority"


def test_it_is_due_when_a_third_is_left(tmp_path: Path) -> None:
    """Of the life since it was made, not since the earlier moment that allows for clocks; and nodes spread a little."""
    authority = CertificateAuthority.create(tmp_path / "ca")
    pem = (authority.issue("n", validity=timedelta(days=30)) / "cert.pem").read_bytes()
    certificate = x509.load_pem_x509_certificate(pem)
    left_days = (certificate.not_valid_after_utc.timestamp() - due_at(certificate)) / 86400
    assert left_days == pytest.approx(10.0)
    assert due_at(certificate, spread=1.0) - due_at(certificate) == pytest.approx(86400.0)
