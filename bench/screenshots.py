"""Pictures of the pages: `headway demo`, looked at by a headless Chromium while it trains and after it.

    .venv/bin/python bench/screenshots.py --out docs

It writes page_cluster.png and page_job.png (dark) of `headway web` while the demo trains, once it has lost a machine,
and page_report.png and page_phone.png of the report that the demo leaves.
"""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Final

from headway.daemon.base.errors import StoreUnreachableError
from headway.daemon.client.cluster_access import find_cluster
from headway.daemon.client.web import Listening, serve
from tests.rigs.browser import CHROMIUM, Page, browser_page

START_S: Final = 120.0
TRAINING_S: Final = 600.0
AT_SHARE: Final = 0.75
"""Share of the batches after which the running job is shown: every kill is past."""
DONE: Final = "window.Headway?.page ? Headway.page.done / Headway.page.picture.num_batches : 0"


async def shoot(out: Path) -> None:
    """Run the demo, and write the pictures."""
    with tempfile.TemporaryDirectory(prefix="headway-shots-") as folder:
        runs = Path(folder) / "demo"
        headway = Path(sys.executable).with_name("headway")
        demo = await asyncio.create_subprocess_exec(headway, "demo", "--out", runs, stdout=asyncio.subprocess.DEVNULL)
        url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(_serve(runs / "state", url))
        try:
            async with browser_page() as page, asyncio.timeout(TRAINING_S):
                await _live(page, await url, out)
                assert await demo.wait() == 0, "the demo failed"
                await page.goto(f"file://{next(runs.glob('*.html'))}")
                await _picture(page, out / "page_report.png", width=1240, height=1000)
                await _picture(page, out / "page_phone.png", width=390, height=844, scale=1.5)
        finally:
            serving.cancel()
            if demo.returncode is None:
                demo.terminate()
                await demo.wait()


async def _serve(cluster: Path, url: "asyncio.Future[str]") -> None:
    """Serve the pages of the demo's cluster, once it is up."""
    async with asyncio.timeout(START_S):
        while True:
            try:
                address = find_cluster(cluster=cluster)
                break
            except StoreUnreachableError:
                await asyncio.sleep(0.5)
    await serve(address, Listening(host="127.0.0.1", port=0), on_ready=url.set_result)


async def _live(page: Page, url: str, out: Path) -> None:
    await page.look(width=1240, height=1000)
    await page.goto(url)
    await page.until("!!document.querySelector('#jobs a')", timeout_s=START_S)
    await page.value("document.querySelector('#jobs a').click()")
    await page.until(f"{DONE} >= {AT_SHARE}", timeout_s=TRAINING_S)
    await _picture(page, out / "page_job.png", width=1240, height=1000, is_dark=True)
    await page.goto(url.split("?")[0])
    await page.until("!!document.querySelector('#jobs a') && !!document.querySelector('#members table')")
    await _picture(page, out / "page_cluster.png", width=1240, height=800)


async def _picture(page: Page, path: Path, **screen: float | bool) -> None:
    await page.look(**screen)  # type: ignore[arg-type]
    await asyncio.sleep(0.5)  # what is drawn anew for the size of a screen is drawn in the next frames
    await page.shoot(path)
    sys.stdout.write(f"{path}: {path.stat().st_size / 1e3:.0f} kB\n")


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
