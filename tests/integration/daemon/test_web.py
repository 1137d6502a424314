"""`headway web` over real sockets and a real etcd: who may read, what nobody can do, and what viewers cost."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from headway.daemon.base.errors import ConfigError
from headway.daemon.client import live_state, web
from headway.daemon.client.cluster_access import ClusterAddress, ClusterSession
from headway.daemon.client.live_state import Topic, Viewer
from headway.daemon.client.web import MOST_VIEWERS, Listening, is_own_host
from headway.daemon.cluster.client import EtcdClient
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.measurements import ProgressRecord
from headway.daemon.local.processes import EtcdServer, EtcdServerConfig
from headway.daemon.net.certificates import CertificateAuthority
from tests.integration.conftest import Etcd
from tests.rigs.fake_cluster import node, records
from tests.rigs.web import PLAIN, served


def browser_of(*, limit: int = 100) -> aiohttp.ClientSession:
    """A client that keeps cookies, also of an address. limit: of connections; 0: none."""
    return aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True), connector=aiohttp.TCPConnector(limit=limit))


@pytest.fixture
async def address(etcd: Etcd, client: EtcdClient, tmp_path: Path) -> ClusterAddress:
    """A cluster with a job under way, as one with its authority's certificate finds it."""
    for key, record in records().items():
        await client.put(key, encode(record))
    folder = etcd.authority.issue("me")
    return ClusterAddress(etcd=(etcd.endpoint,), certificates=folder)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[str, Any]]:
    name = ""
    async for line in response.content:
        if line.startswith(b"event: "):
            name = line[7:].decode().strip()
        elif line.startswith(b"data: "):
            yield name, json.loads(line[6:])


async def _until(response: aiohttp.ClientResponse, part: str, text: str) -> Any:
    """Read events until a part has a text; return it."""
    async with asyncio.timeout(20):
        async for name, value in _events(response):
            if name == part and text in json.dumps(value):
                return value
    raise AssertionError(f"the stream ended without {text}")


async def test_only_the_whole_address_lets_somebody_in(address: ClusterAddress) -> None:
    """Without the token every path is refused; with it comes a cookie that no script and no other site has; then the
    state of the cluster is told.
    """
    async with served(address) as url, browser_of() as browser:
        base, token = url.split("/?token=")
        for path in ("/", "/events", "/page/cluster.js", "/nowhere", "/?token=", f"/?token={token[:-1]}", "/?token=é"):
            async with browser.get(base + path, headers={"Cookie": "headway-1=x"}) as answer:
                assert answer.status == 403, path
                assert "`headway web` printed" in await answer.text()
        async with browser.get(url) as answer:
            assert answer.status == 200
            cookie = answer.headers["Set-Cookie"]
            assert "HttpOnly" in cookie
            assert "SameSite=Strict" in cookie
            assert token not in await answer.text()
        async with browser.get(f"{base}/") as answer:
            assert answer.status == 200
            assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
            assert "<title>headway" in await answer.text()
        async with browser.get(f"{base}/events") as answer:
            assert await _until(answer, "jobs", "batch 50/150")
            assert [row["name"] for row in await _until(answer, "nodes", "leads")] == ["a", "b"]
        async with browser.get(f"{base}/page/../web.py") as answer:
            assert answer.status == 404


async def test_another_name_for_this_server_is_refused(address: ClusterAddress) -> None:
    """A site whose name resolves to this machine would read along: its name in the Host header gives it away."""
    async with served(address) as url, browser_of() as browser:
        for host, status in (("evil.example", 403), ("localhost:1", 200), ("127.0.0.1", 200), ("", 403)):
            async with browser.get(url, headers={"Host": host}) as answer:
                assert answer.status == status, host


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        ("127.0.0.1:80", True),
        ("[::1]:80", True),
        ("192.168.1.2", True),
        ("gpu-1.example.", True),
        (socket.gethostname(), True),
        ("evil.example:80", False),
        ("localhost.evil.example", False),
        ("[::1", False),
        ("gpu-1.example@evil.example", False),
    ],
)
def test_names_of_this_server(host: str, is_own: bool) -> None:
    """Addresses are nobody's name; of names, those of the certificate and the machine's own."""
    assert is_own_host(host, ("gpu-1.example",)) is is_own


async def test_nothing_can_be_written(address: ClusterAddress, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every route takes GET alone, and the session behind them refuses a change, whoever asked for it."""
    sessions: list[ClusterSession] = []

    class Kept(ClusterSession):
        def __init__(self, told: ClusterAddress) -> None:
            super().__init__(told)
            sessions.append(self)

    monkeypatch.setattr(web, "ClusterSession", Kept)
    async with served(address) as url, browser_of() as browser:
        with pytest.raises(ConfigError, match="only reads"):
            await sessions[0].client.delete(Keys.of("demo", "spec"))
        await (await browser.get(url)).read()
        base = url.split("?")[0]
        for method in ("POST", "PUT", "PATCH", "DELETE"):
            for path in ("", "events", "page/cluster.js"):
                async with browser.request(method, base + path) as answer:
                    assert answer.status == 405, (method, path)


async def test_other_addresses_have_tls(address: ClusterAddress, tmp_path: Path) -> None:
    """The network is served with TLS or not at all: one's own certificate, or one for browsers."""
    with pytest.raises(ConfigError, match="--tls-cert and --tls-key"):
        Listening.read("0.0.0.0:0", None, None, None)
    with pytest.raises(ConfigError, match="go together"):
        Listening.read("127.0.0.1:0", tmp_path / "cert.pem", None, None)
    with pytest.raises(ConfigError, match=r"cert\.pem: cannot be used: No such file"):
        Listening.read("0.0.0.0:0", tmp_path / "cert.pem", tmp_path / "key.pem", None)
    assert Listening.read("[::1]:0", None, None, None).tls is None
    assert Listening.read("127.0.0.1:0", None, None, address.certificates).tls is None
    listening = Listening.read("0.0.0.0:0", None, None, address.certificates)
    async with served(address, listening) as url, browser_of() as browser:
        assert url.startswith("https://")
        local = f"127.0.0.1:{url.split(':')[2]}"
        async with browser.get(f"https://{local}", ssl=False) as answer:
            assert answer.status == 200
            assert "Secure" in answer.headers["Set-Cookie"]
        with pytest.raises(aiohttp.ClientError):
            await browser.get(f"http://{local}")


async def test_a_port_that_is_taken_is_named(address: ClusterAddress) -> None:
    """The second server on a port ends in one line that says what to do."""
    async with served(address) as url:
        port = int(url.split("/?")[0].rpartition(":")[2])
        with pytest.raises(ConfigError, match="port 0 takes a free one"):
            async with served(address, replace(PLAIN, port=port)):
                pass


async def test_etcd_goes_away_and_comes_back(own_server_config: EtcdServerConfig) -> None:
    """The page is told at once that etcd does not answer, and what to do; when it is back, so are the jobs."""
    server = await EtcdServer.start(own_server_config)
    folder = CertificateAuthority.open(own_server_config.certificates.parent).issue("me")
    port = int(server.endpoint.rpartition(":")[2])
    address = ClusterAddress(etcd=(server.endpoint,), certificates=folder)
    async with served(address) as url, browser_of() as browser:
        await (await browser.get(url)).read()
        async with browser.get(f"{url.split('?')[0]}events") as answer:
            await _until(answer, "about", "no node is up")
            await server.stop()
            began = time.monotonic()
            told = await _until(answer, "about", "start etcd")
            assert time.monotonic() - began < 8
            assert told["troubles"][0]["about"] == f"etcd at {server.endpoint}"
            server = await EtcdServer.start(replace(own_server_config, client_port=port))
            async with EtcdClient(server.access()) as client:
                for key, record in records().items():
                    await client.put(key, encode(record))
            await _until(answer, "jobs", "batch 50/150")
    await server.stop()


async def test_a_record_that_cannot_be_drawn_is_told(
    address: ClusterAddress, client: EtcdClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault in one part is a sentence on the page: other parts, the server and its other pages go on."""

    def fail(*_: object, **__: object) -> None:
        raise ValueError("no picture")

    monkeypatch.setattr(live_state, "link_rows", fail)
    async with served(address) as url, browser_of() as browser:
        await (await browser.get(url)).read()
        for path, part in (("events", "about"), ("jobs/demo/events", "now"), ("events", "about")):
            async with browser.get(url.split("?")[0] + path) as answer:
                await _until(answer, part, "ValueError: no picture")
        events = url.split("?")[0] + "events"
        async with browser.get(events) as answer:  # the fault stays told, also when only a job has changed
            progress = ProgressRecord(generation=3, batch=50, loss=2.0, tokens_per_second=1.0)
            await client.put(Keys.of("demo", "progress"), encode(progress))
            await _until(answer, "jobs", "batch 51/150")
            async with browser.get(events) as later:
                assert "no picture" in json.dumps(await _until(later, "about", ""))
        monkeypatch.undo()
        monkeypatch.setattr(live_state, "job_row", fail)
        await client.put(Keys.node("late"), encode(node("late")))
        async with browser.get(url.split("?")[0] + "events") as answer:
            await _until(answer, "nodes", "late")


async def test_who_reads_slowly_gets_the_newest_state() -> None:
    """A viewer that takes nothing while a thousand states pass gets the last one of each part, and no other."""
    topic = Topic()
    with topic.viewer() as viewer:
        for number in range(1000):
            topic.tell("jobs", number)
            topic.tell("nodes", -number)
        assert await viewer.next() == b"event: jobs\ndata: 999\n\nevent: nodes\ndata: -999\n\n"
    assert not topic.viewers


async def test_who_takes_nothing_is_dropped(address: ClusterAddress, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that stops to read holds no memory for ever: its connection ends."""
    monkeypatch.setattr(web, "SLOW_S", 0.2)
    monkeypatch.setattr(Viewer, "next", _flood)
    async with served(address) as url:
        base, token = url.split("/?token=")
        port = int(base.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        with closing(writer):
            writer.write(f"GET /events HTTP/1.1\r\nHost: localhost\r\nCookie: headway-{port}={token}\r\n\r\n".encode())
            await asyncio.sleep(1.0)  # what is being tested is that nobody reads
            async with asyncio.timeout(20):
                assert b"200 OK" in await reader.read()


async def _flood(viewer: Viewer) -> bytes:
    return b":" * (1 << 20)


async def test_there_are_only_so_many_viewers(address: ClusterAddress) -> None:
    """One more page than the limit is refused in a line; the others go on."""
    async with served(address) as url, browser_of(limit=0) as browser:
        await (await browser.get(url)).read()
        answers = [await browser.get(f"{url.split('?')[0]}events") for _ in range(MOST_VIEWERS + 1)]
        assert [answer.status for answer in answers] == [200] * MOST_VIEWERS + [503]
        for answer in answers:
            answer.close()


async def test_five_viewers_are_cheap(address: ClusterAddress, client: EtcdClient) -> None:
    """While a job tells a batch a second, five pages and the server together take about 1 % of a core: here with room
    for a busy machine.
    """
    async with served(address) as url, browser_of() as browser:
        await (await browser.get(url)).read()
        answers = [await browser.get(f"{url.split('?')[0]}events") for _ in range(5)]
        readers = [asyncio.create_task(answer.read()) for answer in answers]
        await asyncio.sleep(1)
        began, used = time.monotonic(), time.process_time()
        for batch in range(6):
            progress = ProgressRecord(generation=3, batch=50 + batch, loss=2.0, tokens_per_second=1.0)
            await client.put(Keys.of("demo", "progress"), encode(progress))
            await asyncio.sleep(1)
        share = (time.process_time() - used) / (time.monotonic() - began)
        assert share < 0.04, f"{share:.1%} of a core"
        for reader in readers:
            reader.cancel()
        await asyncio.wait(readers)
