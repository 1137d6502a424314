"""A report in a real browser: from a file, without a network, by mouse, keyboard and on a phone."""

import json
from pathlib import Path

from headway.daemon.cluster.measurements import LinkCuts
from headway.daemon.cluster.records import EventRecord
from headway.daemon.reports.metrics_file import HistoryRow
from headway.daemon.reports.picture import OtherRun, picture_of
from headway.daemon.reports.report_page import write_report
from tests.rigs.browser import browser_page, needs_chromium
from tests.rigs.pictured_job import BEGAN_S, job_view, rows, story

pytestmark = needs_chromium
SHOWN = "[...document.querySelectorAll('.readout div')].map((pair) => pair.innerText.split('\\n'))"


def report(folder: Path, history: list[HistoryRow]) -> str:
    """A page of it, compared with itself, with a cut link; returns its address."""
    cuts = (LinkCuts(ends=(0, 1), num_cut=1, num_back=1, cut_s=1.0),)
    cut = EventRecord(at=BEGAN_S + 50, text="The link was cut <b>for</b> 1 s", generation=2, batch=160, cuts=cuts)
    events = sorted((*story(len(history), 8), cut), key=lambda event: event.at)
    job = job_view(len(history), name="<i>demo", events=tuple(events))
    other = OtherRun(name="the plain loop", rows=history)
    picture = picture_of(job, {}, history, now_s=BEGAN_S, other=other)
    write_report(picture, folder / "run.html")
    return (folder / "run.html").as_uri()


async def test_a_report_is_read_by_mouse_and_keyboard(tmp_path: Path) -> None:
    """It asks only for itself and nothing complains; the cursor's loss has each digit; keys and events move it."""
    history = rows(400, num_generations=4)
    async with browser_page() as page:
        await page.look(width=1280, height=900)
        await page.goto(address := report(tmp_path, history))
        await page.until("!!Headway.page?.line")
        assert await page.value("document.querySelector('h1').textContent") == "<i>demo"
        assert await page.value("document.querySelectorAll('i:not(.bar i), b').length") == 0

        async def tells(**told: str) -> None:
            """The page draws with the screen, so a moment after what it was told."""
            pairs = json.dumps([[name.replace("_", " "), text] for name, text in told.items()])
            shown = f"{SHOWN}.map(String)"
            await page.until(f"{pairs}.every((pair) => {shown}.includes(String(pair)))")

        await tells(loss=repr(history[399].loss))
        await page.value("Headway.page.stack.focus()")
        await page.press("ArrowLeft")
        await tells(batch="398", loss=repr(history[398].loss))
        await page.value("document.querySelectorAll('.events .note')[0].parentElement.click()")
        await tells(batch="160", the_plain_loop="the same, in each digit")
        await page.press("+")
        assert await page.until("Headway.page.to - Headway.page.from < 250")
        await page.press("0")
        assert await page.until("Headway.page.to === 399 && Headway.page.from === 0")
        await page.value("Headway.page.append([{batch: 400, loss: 1.25, tokens: 1, seconds: 1, generation: 5}])")
        assert await page.until("Headway.page.done === 401 && Headway.page.to === 400")
        more = "[401, 402, 403, 404].map((batch) => ({batch, loss: 1.5, tokens: 1, seconds: 1, generation: 5}))"
        await page.value(f"Headway.page.moveTo(400); Headway.page.append({more})")
        assert await page.until("Headway.page.batch === 404"), "who looks at the end goes with it"
        await page.value("Headway.page.append([{batch: 405, loss: null, tokens: 1, seconds: 1, generation: 5}])")
        assert await page.until("Headway.page.batch === 405")
        await tells(loss="not finite")
        assert {each.split("#")[0] for each in page.requests} == {address}
        assert page.complaints == []


async def test_a_report_fits_a_phone_and_the_dark(tmp_path: Path) -> None:
    """Nothing is wider than a screen of 390; the ground follows what the user prefers."""
    async with browser_page() as page:
        await page.look(width=390, height=844, is_dark=True)
        await page.goto(report(tmp_path, rows(400, num_generations=4)))
        await page.until("!!Headway.page?.line")
        assert await page.value("document.documentElement.scrollWidth") <= 390
        assert await page.value("getComputedStyle(document.body).backgroundColor") == "rgb(16, 20, 24)"


async def test_ten_thousand_batches_are_drawn_at_once(tmp_path: Path) -> None:
    """All panels of 10,000 batches, in less than a tenth of a second: the best of ten, since others use the machine."""
    async with browser_page() as page:
        await page.look(width=1280, height=900)
        await page.goto(report(tmp_path, rows(10_000, num_generations=4)))
        await page.until("!!Headway.page?.line")
        times = await page.value("Array.from({length: 10}, () => (Headway.page.draw(), Headway.page.drawn_ms))")
        assert min(times) < 100
