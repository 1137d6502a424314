"""Pictures of the pages, by a headless Chromium.

    PYTHONPATH=. .venv/bin/python bench/screenshots.py --out docs

It trains the demo's job in a cluster of `headway up`, kills a machine, and writes page_job.png, page_cluster.png and
page_cluster_phone.png of `headway web`. Then it runs `headway demo`, and writes report.png, page_dark.png and
page_phone.png of its report. ImageMagick makes them small.
"""

import argparse
import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from headway.daemon.base.errors import StoreUnreachableError
from headway.daemon.client.cluster_access import ClusterAddress, find_cluster, read_cluster_file
from headway.daemon.client.web import Listening, serve
from tests.rigs.browser import CHROMIUM, Page, browser_page

HEADWAY: Final = Path(sys.executable).with_name("headway")
JOB: Final = Path(__file__).parents[1] / "docs/jobs/demo.toml"
START_S: Final = 120.0
TRAINING_S: Final = 600.0
DONE: Final = "(typeof Headway === 'object' && Headway.page ? Headway.page.done : 0)"


async def of_report(page: Page, folder: Path, out: Path) -> None:
    """Run the demo, and take pictures of the report that it leaves."""
    demo = await asyncio.create_subprocess_exec(HEADWAY, "demo", "--out", folder, stdout=asyncio.subprocess.DEVNULL)
    assert await demo.wait() == 0, "the demo failed"
    await page.goto(f"file://{folder}/report.html")
    await page.until(f"{DONE} > 0")
    await picture(page, out / "report.png", width=1240, height=1000)
    await picture(page, out / "page_dark.png", width=1240, height=1000, is_dark=True)
    await picture(page, out / "page_phone.png", width=390, height=844, scale=1.5)


async def of_cluster(page: Page, folder: Path, out: Path) -> None:
    """Train the demo's job in a cluster, kill a machine, and take pictures of `headway web`."""
    async with cluster_in(folder) as address:
        submission = await asyncio.create_subprocess_exec(HEADWAY, "submit", JOB, "--cluster", folder)
        assert await submission.wait() == 0, "the job was refused"
        url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(serve(address, Listening(host="127.0.0.1", port=0), on_ready=url.set_result))
        try:
            await page.look(width=1240, height=1000)
            await page.goto(await url)
            await page.until("!!document.querySelector('#jobs a')", timeout_s=START_S)
            await page.value("document.querySelector('#jobs a').click()")
            await page.until(f"{DONE} >= 30", timeout_s=TRAINING_S)
            found = read_cluster_file(folder)
            assert found is not None
            os.kill(found.pids["node-2"], signal.SIGKILL)
            await page.until(f"{DONE} >= 60", timeout_s=TRAINING_S)
            await picture(page, out / "page_job.png", width=1240, height=1000)
            await page.goto((await url).split("?")[0])
            await page.until("!!document.querySelector('#jobs a') && !!document.querySelector('#members table')")
            await picture(page, out / "page_cluster.png", width=1240, height=860)
            await picture(page, out / "page_cluster_phone.png", width=390, height=844, scale=1.5)
        finally:
            serving.cancel()
            await asyncio.wait({serving})


@asynccontextmanager
async def cluster_in(folder: Path) -> AsyncIterator[ClusterAddress]:
    """Start three nodes, and give their address."""
    cluster = await asyncio.create_subprocess_exec(
        HEADWAY, "up", "--state-dir", folder, stdout=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(START_S):
            while True:
                try:
                    address = find_cluster(cluster=folder)
                    break
                except StoreUnreachableError:
                    await asyncio.sleep(0.5)
        yield address
    finally:
        cluster.send_signal(signal.SIGINT)
        await cluster.wait()


async def picture(
    page: Page, path: Path, *, width: int, height: int, is_dark: bool = False, scale: float = 1.0
) -> None:
    """Write what a screen of this size shows."""
    await page.look(width=width, height=height, is_dark=is_dark, scale=scale)
    await asyncio.sleep(0.5)  # the page is drawn anew for this size in its next frames
    await page.value("scrollTo(0, 0)")
    await page.shoot(path)
    if (smaller := shutil.which("convert")) is not None:
        told = await asyncio.create_subprocess_exec(smaller, path, "+dither", "-colors", "128", f"PNG8:{path}")
        assert await told.wait() == 0, "ImageMagick failed"
    sys.stdout.write(f"{path}: {path.stat().st_size / 1e3:.0f} kB\n")


async def shoot(out: Path) -> None:
    """Write all pictures."""
    with tempfile.TemporaryDirectory(prefix="headway-pages-") as folder:
        async with browser_page() as page:
            await of_cluster(page, Path(folder) / "cluster", out)
            await of_report(page, Path(folder) / "demo", out)


def main() -> int:
    """Parse the command line, and write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "headway-pages")
    told = parser.parse_args()
    told.out.mkdir(exist_ok=True)
    if CHROMIUM is None:
        sys.stderr.write("needs Chromium: apt-get install chromium\n")
        return 0
    asyncio.run(shoot(told.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
