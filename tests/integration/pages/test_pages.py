"""The pages in a real browser: what they ask, show and cost. SHOTS=DIR also writes pictures of them."""

import json
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway.daemon.client.cluster_access import ClusterAddress
from headway.daemon.cluster.client import EtcdClient
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.measurements import LinkProbe, ProbeRecord, ProgressRecord
from headway.daemon.cluster.transaction import Put
from headway.daemon.reports.picture import picture_of
from headway.daemon.reports.report_page import page_html
from tests.integration.conftest import Etcd
from tests.rigs.browser import Page, browser_page, needs_chromium
from tests.rigs.fake_cluster import node, records
from tests.rigs.pictured_job import job_view, rows
from tests.rigs.web import served

pytestmark = needs_chromium
DRAWN_MS = 100.0
"""A picture of 10,000 batches is drawn within this time."""
LOSS = "[...document.querySelectorAll('.readout div')].find((d) => /^loss/.test(d.textContent)).lastChild.textContent"
OVERFLOW = "document.scrollingElement.scrollWidth - document.scrollingElement.clientWidth"
DRAW = """async () => {
    const began = performance.now();
    Headway.page.draw();
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    return performance.now() - began;
}"""
"""Draws everything, and waits for the frame that shows it."""
SCREENS = {"desktop": (1240, 900, False), "dark": (1240, 900, True), "phone": (390, 844, False)}


@pytest.fixture
async def page() -> AsyncIterator[Page]:
    """A tab of a browser that has seen nothing yet."""
    async with browser_page() as page:
        yield page


@pytest.fixture
async def address(etcd: Etcd, client: EtcdClient) -> ClusterAddress:
    """A cluster with a job under way, and a name that would be markup."""
    for key, record in records().items():
        await client.put(key, encode(record))
    bad = replace(node("bad"), site="<img src=x onerror=alert(1)>", worker_trouble="</script><b>bold</b>")
    await client.put(Keys.node("bad"), encode(bad))
    return ClusterAddress(etcd=(etcd.endpoint,), certificates=etcd.authority.issue("me"))


async def _shoot(page: Page, name: str) -> None:
    """See that nothing is wider than any screen; write pictures if they are wanted."""
    for screen, (width, height, is_dark) in SCREENS.items():
        await page.look(width=width, height=height, is_dark=is_dark)
        await page.until(f"{OVERFLOW} <= 0", timeout_s=5)
        if folder := os.environ.get("SHOTS"):
            await page.shoot(Path(folder) / f"{name}-{screen}.png")
    await page.look(width=1240, height=900)


def _asked(page: Page, base: str) -> list[str]:
    return [url for url in page.requests if not url.startswith((base, "data:"))]


async def test_the_page_of_a_cluster(page: Page, address: ClusterAddress) -> None:
    """It asks this server alone, shows names as text, fits a phone, and finds a node by `/` and a part of its name."""
    async with served(address) as url:
        await page.goto(url)
        await page.until("document.querySelectorAll('#nodes tbody tr').length === 3")
        assert "node bad: </script><b>bold</b>" in await page.value("document.getElementById('health').textContent")
        assert await page.value("document.querySelectorAll('img, b b').length") == 0
        await _shoot(page, "cluster")
        await page.press("/")
        await page.press("b")
        await page.press("a")
        await page.press("d")
        await page.until("document.querySelectorAll('#nodes tbody tr').length === 1")
        assert _asked(page, url.split("?")[0]) == []
        assert page.complaints == []
    await page.until("document.getElementById('health').textContent.includes('dials again')")


async def test_a_thousand_nodes(page: Page, address: ClusterAddress, client: EtcdClient) -> None:
    """Twenty sites of fifty nodes come folded, with a map of the ways between sites; one opens at a touch."""
    for site in range(20):
        puts = []
        for number in range(50):
            name, other = f"s{site:02d}-n{number:02d}", f"s{(site + 1) % 20:02d}-n{number:02d}"
            probes = {other: LinkProbe(round_trip_s=0.02, bytes_per_s=1e8)}
            puts.append(Put(Keys.node(name), encode(replace(node(name), site=f"site-{site:02d}"))))
            puts.append(Put(Keys.probes(name), encode(ProbeRecord(incarnation=f"{name}-1", peers=probes))))
        for begin in (0, 50):
            await client.transaction([], puts[begin : begin + 50])
    async with served(address) as url:
        await page.goto(url)
        await page.until("document.querySelectorAll('#nodes details').length === 22")
        assert await page.value("document.querySelectorAll('#nodes tbody tr').length") == 0
        assert await page.value("document.querySelectorAll('#links line').length") >= 20
        await page.value("document.querySelector('#nodes details:nth-child(8) summary').click()")
        await page.until("document.querySelectorAll('#nodes tbody tr').length === 50")
        took_ms = await page.value(
            "(() => { const t = performance.now(); drawNodes(); return performance.now() - t; })()"
        )
        assert took_ms < DRAWN_MS
        await _shoot(page, "thousand")


async def test_the_page_of_a_job_is_kept_up(page: Page, address: ClusterAddress, client: EtcdClient) -> None:
    """The loss at the cursor is the record's, in each digit; new batches come by themselves; a rollback takes its own
    back; and a click on an event moves the cursor.
    """

    async def tell(first: int, losses: list[float]) -> None:
        recent = tuple(enumerate(losses, start=first))
        progress = ProgressRecord(
            generation=3, batch=recent[-1][0], loss=losses[-1], tokens_per_second=9.0, recent=recent
        )
        await client.put(Keys.of("demo", "progress"), encode(progress))

    await tell(0, [2.0, 1.9123456789012345])
    async with served(address) as url:
        await page.goto(url)
        await page.until("!!document.querySelector('#jobs a')")
        await page.value("document.querySelector('#job-demo').click()")
        await page.until(f"{LOSS} === '1.9123456789012345'")
        await tell(2, [0.1 + 0.2])
        await page.until(f"{LOSS} === '0.30000000000000004'")
        await tell(1, [1.5])
        await page.until(f"{LOSS} === '1.5'")
        await page.until("document.getElementById('health').textContent.includes('losing one machine costs 2 batches')")
        await page.value("document.querySelector('.events button').click()")
        await page.until(f"{LOSS} === '2'")
        await _shoot(page, "job")
        await page.goto(url.split("?")[0] + "jobs/nobody")
        await page.until("document.body.textContent.includes('no such job')")
        assert _asked(page, url.split("?")[0]) == []
        assert [each for each in page.complaints if "404" not in each] == []


async def test_a_report_without_a_network(page: Page, tmp_path: Path) -> None:
    """From file://, 10,000 batches are drawn in 100 ms, and the loss at the cursor is that of metrics.jsonl.

    Drawn anew, the list of events stays where its reader has moved it.
    """
    history = rows(10_000, num_generations=4)
    lines = [json.dumps(row.as_dict()) for row in history]
    picture = picture_of(job_view(10_000), {}, history, now_s=0.0)
    (tmp_path / "run.html").write_text(page_html(picture), encoding="utf-8")
    await page.look(width=1240, height=900)
    await page.goto(f"file://{tmp_path}/run.html")
    await page.until("Headway.page.drawn_ms > 0")
    drawn_ms = min([await page.value(f"({DRAW})()") for _ in range(3)])
    sys.stderr.write(f"10,000 batches are drawn in {drawn_ms:.0f} ms\n")
    assert drawn_ms < DRAWN_MS
    for wanted in (0, 4321, 9999):
        await page.value(f"Headway.page.moveTo({wanted})")
        batch = await page.value("Headway.page.batch")
        written: dict[str, Any] = json.loads(lines[batch])
        assert f'"loss": {await page.value(LOSS)}' in lines[batch]
        assert float(await page.value(LOSS)) == written["loss"]
    await _shoot(page, "report")
    short = "document.styleSheets[0].insertRule('.events{max-height:9px!important}')"
    await page.value(f"{short}, document.querySelector('.events').scrollTop = 20, Headway.page.drawBelow()")
    assert await page.value("document.querySelector('.events').scrollTop") == 20
    assert page.complaints == []
    assert [url for url in page.requests if not url.startswith(("file:", "data:"))] == []
