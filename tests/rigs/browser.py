"""A headless Chromium, driven over its DevTools protocol. Debian's package `chromium` brings it."""

import asyncio
import base64
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest

CHROMIUM: Final = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: `make pages` says how to install it")
START_S: Final = 60.0
ANSWER_S: Final = 60.0


class Page:
    """One tab. Every wait has a deadline."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.requests: list[str] = []
        """Addresses that the page has asked for."""
        self.complaints: list[str] = []
        """Errors and warnings of its console, exceptions and refusals by its policy."""
        self._socket = socket
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._session = ""
        self._number = 0

    async def tell(self, method: str, **parameters: object) -> dict[str, Any]:
        """Do one command of the protocol."""
        self._number += 1
        answer = self._answers[self._number] = asyncio.get_running_loop().create_future()
        session = {"sessionId": self._session} if self._session else {}
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters} | session)
        async with asyncio.timeout(ANSWER_S):
            found = await answer
        assert "error" not in found, f"{method}: {found}"
        result: dict[str, Any] = found["result"]
        return result

    async def read(self) -> None:
        """Take what the browser says, until it ends."""
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                self._answers.pop(told["id"]).set_result(told)
            elif told["method"] == "Network.requestWillBeSent":
                self.requests.append(told["params"]["request"]["url"])
            elif told["method"] == "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(told["params"]["exceptionDetails"])[:500])
            elif told["method"] == "Log.entryAdded" and told["params"]["entry"]["level"] in ("error", "warning"):
                self.complaints.append(told["params"]["entry"]["text"])

    async def attach(self) -> None:
        """Take over a new tab."""
        target = (await self.tell("Target.createTarget", url="about:blank"))["targetId"]
        attached = await self.tell("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self.tell(f"{domain}.enable")

    async def goto(self, url: str) -> None:
        """Go to an address, a file's too."""
        found = await self.tell("Page.navigate", url=url)
        assert not found.get("errorText"), found

    async def value(self, script: str) -> Any:
        """Return what JavaScript returns, as JSON; promises are awaited."""
        found = await self.tell("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def until(self, script: str, *, timeout_s: float = 30.0) -> Any:
        """Wait until JavaScript returns something true, and return it."""
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    if found := await self.value(script):
                        return found
                except AssertionError:
                    pass  # the page is just being replaced by another one
                await asyncio.sleep(0.05)

    async def look(self, *, width: int, height: int, is_dark: bool = False, scale: float = 1.0) -> None:
        """Set the size of the screen, and what its user prefers."""
        is_phone = width < 600
        screen = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": is_phone}
        await self.tell("Emulation.setDeviceMetricsOverride", **screen)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        await self.tell("Emulation.setEmulatedMedia", features=[scheme])

    async def shoot(self, path: Path) -> None:
        """Write what the screen shows as PNG."""
        await self.value("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        found = await self.tell("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(found["data"]))

    async def press(self, key: str) -> None:
        """Press a key, for instance `ArrowRight` or `/`."""
        text = {"text": key} if len(key) == 1 else {}
        await self.tell("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        await self.tell("Input.dispatchKeyEvent", type="keyUp", key=key)


@asynccontextmanager
async def browser_page() -> AsyncIterator[Page]:
    """Start a browser with nothing remembered, and give its page."""
    assert CHROMIUM is not None
    options = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run "
    options += "--disable-background-networking --ignore-certificate-errors --remote-debugging-port=0"
    with tempfile.TemporaryDirectory(prefix="headway-browser-", ignore_cleanup_errors=True) as folder:
        process = await asyncio.create_subprocess_exec(
            CHROMIUM,
            *options.split(),
            f"--user-data-dir={folder}",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            assert process.stderr is not None
            async with asyncio.timeout(START_S):
                while not (line := (await process.stderr.readline()).decode()).startswith("DevTools listening on "):
                    assert line, "Chromium ended"
            draining = asyncio.create_task(process.stderr.read())
            async with (
                aiohttp.ClientSession() as session,
                session.ws_connect(line.split()[-1], max_msg_size=0) as socket,
            ):
                page = Page(socket)
                reading = asyncio.create_task(page.read())
                await page.attach()
                yield page
                reading.cancel()
                await asyncio.wait({reading})
        finally:
            process.terminate()
            await process.wait()
            draining.cancel()
            await asyncio.wait({draining})
