"""A headless Chromium that opens a page and returns its requests and console messages."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from command_lines import PATIENCE
from tornado.httpclient import AsyncHTTPClient
from tornado.websocket import websocket_connect

PATH = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
FLAGS = ("--headless=new", "--disable-gpu", "--remote-debugging-port=0", "--no-first-run")


@dataclass
class Visit:
    """What a page did.

    requests   URLs of everything that was asked for, the page itself first
    messages   of the console and of exceptions, warnings and errors only
    values     of the expressions that were evaluated in the page
    """

    requests: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    values: list[object] = field(default_factory=list)


def visit(
    page: Path | str,
    folder: Path,
    ready: str,
    expressions: tuple[str, ...] = (),
):
    """Open a page, wait until `ready` is true in it, and evaluate expressions.

    page   a file, or an address
    """
    flags = (
        *FLAGS,
        "--window-size=1400,1150",
        f"--user-data-dir={folder}",
        *(["--no-sandbox"] if os.geteuid() == 0 else []),
    )
    with (folder.parent / "chromium.log").open("w") as log:
        process = subprocess.Popen([PATH, *flags, "about:blank"], stdout=log, stderr=log)
    try:
        return asyncio.run(_visit(page, folder, ready, expressions))
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()


async def _visit(page, folder, ready, expressions):
    socket = await websocket_connect(await _address(folder), max_message_size=1 << 28)
    seen, number = Visit(), 0

    async def call(method, **parameters):
        nonlocal number
        number += 1
        await socket.write_message(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(await asyncio.wait_for(socket.read_message(), PATIENCE))
            if message.get("id") == number:
                return message.get("result", message)
            note(message.get("method"), message.get("params", {}))

    def note(method, parameters):
        if method == "Network.requestWillBeSent":
            seen.requests.append(parameters["request"]["url"])
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            seen.messages.append(str([argument.get("value") for argument in parameters["args"]]))
        elif method == "Runtime.exceptionThrown":
            seen.messages.append(str(parameters["exceptionDetails"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            seen.messages.append(parameters["entry"]["text"])

    async def value(expression):
        result = await call("Runtime.evaluate", expression=expression, returnByValue=True)
        return result["result"].get("value")

    for domain in ("Page", "Network", "Runtime", "Log"):
        await call(f"{domain}.enable")
    await call("Page.navigate", url=page if isinstance(page, str) else page.absolute().as_uri())
    end = time.monotonic() + PATIENCE
    while not await value(ready):
        assert time.monotonic() < end, f"the page never became ready; {seen}"
        await asyncio.sleep(0.1)
    seen.values = [await value(expression) for expression in expressions]
    await asyncio.sleep(0.5)
    socket.close()
    return seen


async def _address(folder: Path) -> str:
    """Where the browser's only page listens: Chromium writes the port into its folder."""
    port, end = folder / "DevToolsActivePort", time.monotonic() + PATIENCE
    while not (port.exists() and port.read_text().strip()):
        assert time.monotonic() < end, "Chromium did not start"
        await asyncio.sleep(0.1)
    address = f"http://127.0.0.1:{port.read_text().splitlines()[0]}/json"
    pages = json.loads((await AsyncHTTPClient().fetch(address)).body)
    return next(page["webSocketDebuggerUrl"] for page in pages if page["type"] == "page")
