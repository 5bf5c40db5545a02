"""How the page does on 1,000 nodes and 100,000 events: first paint, frames while events stream; and its pictures.

    python -m tests.browser.bench [--pictures DIR] [--nodes N] [--entries N]

A table of figures, no assertion about time. The log is simulated (big_log.py), the coordinator real, over a log in
memory: the page reads its whole backlog while new entries stream in as quickly as the coordinator folds them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.browser.big_log import entries
from tests.browser.chromium import Page, browsing
from tests.browser.test_page import replayed
from tests.replay.logs import troubled
from tests.unicrond.serving import serving
from unicrond.replay.views.moments import Moments
from unicrond.views.view import feed_all

#: How many entries stream while frames are watched.
STREAMED = 5_000
_FRAMES = """new Promise((done) => {
  const gaps = []; let last = performance.now(); const end = last + %d;
  const frame = (now) => { gaps.push(now - last); last = now; now < end ? requestAnimationFrame(frame) : done(gaps); };
  requestAnimationFrame((now) => { last = now; requestAnimationFrame(frame); });
})"""


async def pictures(page: Page, url: str, where: Path, name: str, views: tuple[str, ...]) -> None:
    await page.size(1280, 860)
    await page.open(url)
    await page.until("document.querySelector('#health').innerText.length > 20")
    for view in views:
        await page.js(f"location.hash = {view!r}")
        await asyncio.sleep(1.5)
        if view == "incidents":
            await page.js("document.querySelector('tr.click').click()")
            await page.until("document.querySelector('#story .account').textContent.startsWith('Incident i')")
        await page.picture(where / f"{name}-{view}.png")


async def first_paint_ms(page: Page, url: str) -> float:
    """Until nodes are on the screen."""
    began = time.monotonic()
    await page.open(url)
    await page.until("document.querySelectorAll('.card').length > 2 && document.querySelector('#grid').width > 300")
    return (time.monotonic() - began) * 1000


async def live(page: Page, nodes: int, count: int) -> dict[str, Any]:
    """A coordinator that has folded the log, and goes on."""
    log = entries(nodes, count + STREAMED)
    with tempfile.TemporaryDirectory() as directory:
        async with serving(Path(directory), list(log[:count])) as served:
            paint_ms = await first_paint_ms(page, served.url + "/")
            found: dict[str, Any] = {"first_paint_ms": round(paint_ms)}
            for view in ("cluster", "log", "tasks"):
                await page.js(f"location.hash = {view!r}")
                frames = asyncio.create_task(page.js(_FRAMES % 5000))
                part = STREAMED // 3
                for number in range(part):
                    await served.log.append([log[count].envelope])
                    count += 1
                    if number % 10 == 0:
                        await asyncio.sleep(0.02)
                gaps = await frames
                found[f"frames_{view}"] = {
                    "count": len(gaps),
                    "longest_ms": round(max(gaps), 1),
                    "over_100_ms": sum(gap > 100 for gap in gaps),
                }
            return found


async def measured(options: argparse.Namespace) -> dict[str, Any]:
    async with browsing() as page:
        await page.size(1280, 860)
        found = await live(page, options.nodes, options.entries)
    moments = Moments()
    feed_all(moments, entries(options.nodes, options.entries))
    async with replayed(moments) as url, browsing() as page:
        await page.size(1280, 860)
        found["replay_first_paint_ms"] = round(await first_paint_ms(page, url))
        began = time.monotonic()
        move = "const s = document.querySelector('#slider'); s.value = 5000; s.dispatchEvent(new Event('input'))"
        before = await page.js("document.querySelector('#health').innerText")
        await page.js(move)
        await page.until(f"document.querySelector('#health').innerText !== {before!r}")
        found["slider_ms"] = round((time.monotonic() - began) * 1000)
        if options.pictures:
            await pictures(page, url, options.pictures, "large", ("cluster", "incidents"))
    return found


async def drawn(where: Path) -> None:
    """The pictures of the documents."""
    moments = Moments()
    feed_all(moments, troubled(3, 30).log)
    async with replayed(moments) as url, browsing() as page:
        await page.dark(True)
        await pictures(page, url, where, "replay", ("incidents", "goodput"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=Path)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--entries", type=int, default=100_000)
    options = parser.parse_args()
    if options.pictures:
        options.pictures.mkdir(parents=True, exist_ok=True)
        asyncio.run(drawn(options.pictures))
    print(json.dumps(asyncio.run(measured(options)), indent=1))


if __name__ == "__main__":
    main()
