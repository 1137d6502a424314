"""A real etcd as a child process: how it starts, stops, survives, and whom it refuses."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from headway.daemon.base.errors import ConfigError, StoreError, StoreUnreachableError
from headway.daemon.client.cluster_access import ClusterAddress, ClusterSession
from headway.daemon.cluster.client import EtcdClient
from headway.daemon.cluster.connection import EtcdAccess
from headway.daemon.cluster.watch import KeyEvent, WatchBatch
from headway.daemon.local.processes import EtcdServer, EtcdServerConfig
from headway.daemon.net.certificates import CertificateAuthority
from headway.stages.sockets.tls_identity import TlsIdentity
from tests.integration.conftest import Etcd
from tests.rigs.server import free_port

DEADLINE_S = 30.0


def is_one_line(error: StoreError | ConfigError) -> bool:
    """Return whether a person can read it at a glance."""
    return "\n" not in str(error) and "Traceback" not in str(error)


async def first_events(changes: AsyncIterator[WatchBatch], count: int) -> list[KeyEvent]:
    """The next `count` events of a watch."""
    events: list[KeyEvent] = []
    async with asyncio.timeout(DEADLINE_S):
        async for batch in changes:
            events += batch.events
            if len(events) >= count:
                return events
    raise AssertionError("a watch never ends")


async def test_keys_survive_a_restart_with_new_ports_and_a_new_authority(
    own_server_config: EtcdServerConfig, tmp_path: Path
) -> None:
    """Stop, make the certificates anew, start on the same folder: the keys are there, the old identity is refused."""
    async with await EtcdServer.start(own_server_config) as server:
        old_identity = TlsIdentity.read(own_server_config.certificates)
        async with EtcdClient(server.access()) as client:
            await client.put("/kept", b"value")
    certificates = CertificateAuthority.create(tmp_path / "second").issue("etcd")
    async with await EtcdServer.start(replace(own_server_config, certificates=certificates)) as again:
        assert again.endpoint != server.endpoint
        async with EtcdClient(again.access()) as client:
            entry = await client.get("/kept")
            assert entry is not None
            assert entry.value == b"value"
        async with EtcdClient(again.access(old_identity, timeout_s=0.7)) as stranger:
            with pytest.raises(StoreUnreachableError) as refused:
                await stranger.get("/kept")
            assert is_one_line(refused.value)
    assert again.returncode is not None


async def test_keys_survive_a_kill(own_server_config: EtcdServerConfig) -> None:
    """SIGKILL in the middle of work: `wait` tells it, and the next server has every key that was answered."""
    config = replace(own_server_config, fsync=True)
    async with await EtcdServer.start(config) as server, EtcdClient(server.access()) as client:
        await client.put("/kept", b"value")
        ended = asyncio.create_task(server.wait())
        os.kill(server.pid, signal.SIGKILL)
        assert await asyncio.wait_for(ended, DEADLINE_S) == -signal.SIGKILL
    async with await EtcdServer.start(config) as server, EtcdClient(server.access()) as client:
        assert await client.get("/kept") is not None


@pytest.mark.parametrize("call", ["get", "put"])
async def test_an_absent_etcd_is_reported_within_the_deadline(etcd: Etcd, call: str) -> None:
    """Nobody listens on the port: StoreUnreachableError, naming it, after one deadline and not much more."""
    endpoint = f"127.0.0.1:{free_port()}"
    access = EtcdAccess(endpoints=(endpoint,), identity=etcd.identity, timeout_s=1.0)
    clock = asyncio.get_running_loop().time
    async with EtcdClient(access) as client:
        started_at = clock()
        with pytest.raises(StoreUnreachableError, match="refused") as error:
            await (client.get("/x") if call == "get" else client.put("/x", b""))
        assert clock() - started_at < 10
    assert endpoint in str(error.value)
    assert is_one_line(error.value)


async def test_a_dead_endpoint_before_a_living_one_is_passed_over(etcd: Etcd) -> None:
    """Two endpoints, the first is dead: reads and writes reach the second."""
    endpoints = (f"127.0.0.1:{free_port()}", etcd.endpoint)
    async with EtcdClient(EtcdAccess(endpoints=endpoints, identity=etcd.identity, timeout_s=10)) as client:
        await client.put("/x", b"1")
        assert await client.get("/x") is not None
        assert (await client.status()).version.startswith("3.")


async def test_a_port_in_use_is_one_line(own_server_config: EtcdServerConfig) -> None:
    """Somebody listens on the wanted port: ConfigError names it, and no etcd is left."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} is in use") as error:
            await EtcdServer.start(replace(own_server_config, client_port=port))
    assert is_one_line(error.value)


async def test_a_server_that_cannot_start_says_why(own_server_config: EtcdServerConfig) -> None:
    """The certificate is no certificate: ConfigError with etcd's own last line, and where the log is."""
    (own_server_config.certificates / "cert.pem").write_text("nonsense")
    with pytest.raises(ConfigError, match="etcd ended with code") as error:
        await EtcdServer.start(own_server_config)
    assert is_one_line(error.value)
    assert str(own_server_config.log_file) in str(error.value)


async def test_a_full_disk_is_named_and_no_function_of_go(own_server_config: EtcdServerConfig, tmp_path: Path) -> None:
    """etcd's log ends with a stack then; what it says of its end stands before."""
    binary = tmp_path / "etcd"
    told = '{"level":"panic","msg":"failed to create WAL","error":"no space left on device"}'
    binary.write_text(
        f"#!/bin/sh\necho '{told}'; echo 'panic: failed to create WAL'; echo '  main.go:32 +0x45'; exit 2\n"
    )
    binary.chmod(0o755)
    with pytest.raises(ConfigError, match=r"code 2: failed to create WAL: no space left on device$"):
        await EtcdServer.start(replace(own_server_config, binary=binary))


async def test_a_server_frozen_while_stopping_is_killed(own_server_config: EtcdServerConfig) -> None:
    """SIGSTOP, so that SIGTERM has no effect: `stop` ends it at its deadline all the same."""
    server = await EtcdServer.start(own_server_config)
    os.kill(server.pid, signal.SIGSTOP)
    await asyncio.wait_for(server.stop(timeout_s=0.2), DEADLINE_S)
    assert server.returncode == -signal.SIGKILL
    await server.stop()


async def test_a_server_dies_with_the_process_that_started_it(own_server_config: EtcdServerConfig) -> None:
    """A Python process starts etcd and gets SIGKILL: etcd is gone too."""
    program = Path(__file__).with_name("server_process.py")
    arguments = [str(getattr(own_server_config, name)) for name in ("binary", "data_dir", "log_file", "certificates")]
    owner = subprocess.Popen([sys.executable, str(program), *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        etcd_pid = int(await asyncio.to_thread(owner.stdout.readline))
        handle = os.pidfd_open(etcd_pid)
        gone = asyncio.Event()
        asyncio.get_running_loop().add_reader(handle, gone.set)
        owner.kill()
        await asyncio.wait_for(gone.wait(), DEADLINE_S)
        asyncio.get_running_loop().remove_reader(handle)
        os.close(handle)
    finally:
        owner.kill()
        owner.wait(timeout=10)
        if owner.stdout is not None:
            owner.stdout.close()


async def test_a_watch_from_an_old_revision_catches_up_after_a_restart(own_server_config: EtcdServerConfig) -> None:
    """One event is seen, etcd is killed and started: a watch from there on has the other 50, in order."""
    config = replace(own_server_config, client_port=free_port(), fsync=True)
    server = await EtcdServer.start(config)
    try:
        async with EtcdClient(server.access(timeout_s=10)) as watching, EtcdClient(server.access()) as writing:
            start = (await writing.status()).revision + 1
            await writing.put("/w/0", b"")
            seen = await first_events(watching.watch("/w/", from_revision=start), 1)
            await server.kill()
            await server.restart()
            for index in range(1, 50):
                await writing.put(f"/w/{index}", b"")
            await writing.delete("/w/0")
            changes_after = watching.watch("/w/", from_revision=seen[-1].mod_revision + 1)
            seen += await first_events(changes_after, 50)
            assert [event.key for event in seen] == [*(f"/w/{index}" for index in range(50)), "/w/0"]
            assert seen[-1].value is None
    finally:
        await server.stop()


async def test_a_full_etcd_refuses_writes_and_keeps_leases(own_server_config: EtcdServerConfig) -> None:
    """Its quota is used up: a write says so in one line, as something that passes; reads and renewals go on.

    Commands that read say so too, with the command line that makes room.
    """
    config = replace(own_server_config, flags={"quota-backend-bytes": str(4 * 2**20)})
    async with await EtcdServer.start(config) as server, EtcdClient(server.access()) as client:
        lease = await client.grant_lease(10)

        async def fill() -> None:
            while True:
                try:
                    await client.put("/big", bytes(2**20))
                except StoreUnreachableError as error:
                    if "no room" in str(error):
                        raise  # any other is a slow disk's

        with pytest.raises(StoreUnreachableError, match="no room: database space exceeded") as full:
            await asyncio.wait_for(fill(), 30.0)
        assert is_one_line(full.value)
        assert await client.get("/big") is not None
        assert await client.renew_lease(lease.id) > 0
        address = ClusterAddress(etcd=(server.endpoint,), certificates=config.certificates)
        async with ClusterSession(address) as session:
            told = await session.why_full()
            assert is_one_line(ConfigError(told))
            tools = f"{config.binary.parent}:{os.environ['PATH']}"
            done = subprocess.run(["sh", "-ec", told.split("`")[1]], check=False, env=os.environ | {"PATH": tools})
            assert done.returncode == 0
            assert not await session.why_full()
        await client.put("/small", b"")


async def test_a_watch_ends_when_its_server_does(own_server_config: EtcdServerConfig) -> None:
    """etcd is killed: the watch says at once that it is over, and which etcd it was."""
    async with await EtcdServer.start(own_server_config) as server, EtcdClient(server.access()) as client:
        revision = await client.put("/w/0", b"")
        changes = client.watch("/w/", from_revision=revision)
        await first_events(changes, 1)
        waiting = asyncio.create_task(first_events(changes, 1))
        await asyncio.sleep(0)
        await server.kill()
        with pytest.raises(StoreUnreachableError, match=server.endpoint):
            await asyncio.wait_for(waiting, 10.0)


async def test_a_watch_of_the_future_does_not_wait_for_it(etcd: Etcd, client: EtcdClient) -> None:
    """A revision that etcd has yet to reach by a hundred changes, as after a restored backup: it ends at once."""
    revision = (await client.status()).revision
    with pytest.raises(StoreUnreachableError, match=f"is at revision {revision}, before {revision + 99}"):
        await first_events(client.watch("/w/", from_revision=revision + 100), 1)


async def test_a_watch_notices_a_server_that_stands_still(
    own_server_config: EtcdServerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quiet watch of a living etcd goes on; when etcd is frozen, it ends although the connection still stands."""
    monkeypatch.setattr("headway.daemon.cluster.watch.QUIET_S", 0.1)
    monkeypatch.setattr("headway.daemon.cluster.watch.SILENT_S", 0.5)
    async with await EtcdServer.start(own_server_config) as server, EtcdClient(server.access()) as client:
        revision = await client.put("/w/0", b"")
        changes = client.watch("/w/", from_revision=revision)
        await first_events(changes, 1)
        waiting = asyncio.create_task(first_events(changes, 1))
        await asyncio.wait({waiting}, timeout=0.5)
        assert not waiting.done()
        os.kill(server.pid, signal.SIGSTOP)
        with pytest.raises(StoreUnreachableError, match="said nothing"):
            await asyncio.wait_for(waiting, 3.0)
        os.kill(server.pid, signal.SIGCONT)


async def test_etcd_away_ends_a_strict_lease_and_no_other(own_server_config: EtcdServerConfig) -> None:
    """etcd is stopped: the strict holder knows after one lease time; the other lease is whole when etcd is back."""
    config = replace(own_server_config, client_port=free_port(), fsync=True)
    server = await EtcdServer.start(config)
    try:
        async with EtcdClient(server.access(timeout_s=1.0)) as client:
            strict = await client.grant_lease(1, is_strict=True)
            lenient = await client.grant_lease(1)
            await client.put("/alive", b"", lease_id=lenient.id)
            await server.kill()
            await asyncio.wait_for(strict.lost.wait(), 10)
            assert "not renewed within 1 s (no answer" in strict.reason
            async with asyncio.timeout(DEADLINE_S):
                while lenient.remaining_s > 0:
                    await asyncio.sleep(0.05)
            lenient.check()
            await server.restart()
            async with asyncio.timeout(DEADLINE_S):
                while lenient.remaining_s == 0:
                    await asyncio.sleep(0.05)
            assert not lenient.lost.is_set()
            assert await client.get("/alive") is not None
            await lenient.revoke()
            await strict.revoke()
            assert await client.get("/alive") is None
    finally:
        await server.stop()
