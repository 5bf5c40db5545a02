"""The page in a real browser: live over a coordinator, and over a replayed log. `make browser` runs more."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from tests.browser.chromium import MISSING, Page, browsing, chromium
from tests.replay.logs import troubled
from tests.unicrond.serving import Served, healed_cluster, serving
from tests.unicrond.test_gpu_types import FAST, SLOW, with_task
from tests.unicrond.test_gpu_types import cluster_of as types_of
from tests.unicrond.test_program_faults import end
from unicrond.core.state.alarms import Alarm
from unicrond.events import vocabulary as v
from unicrond.intake.config import ApiConfig, Config
from unicrond.intake.tokens import Scope, line_of, make_token
from unicrond.replay.views.moments import Moments
from unicrond.replay.views.page_server import PageServer
from unicrond.views.view import feed_all

pytestmark = pytest.mark.skipif(chromium() is None, reason=MISSING)
#: A node is looked for by its name.
FIND_N2 = """const field = document.querySelector('input[type=search]');
field.value = 'n2'; field.dispatchEvent(new Event('input'))"""
VIEWS = ("cluster", "tasks", "incidents", "goodput", "plan", "ranks", "log")


async def seen(page: Page, view: str, text: str) -> None:
    await page.js(f"location.hash = {view!r}")
    await page.until(f"document.querySelector('#main').innerText.includes({text!r})")


async def walked(page: Page) -> None:
    """Every view says what it is for."""
    await seen(page, "cluster", "SLOTS IN USE".lower())
    await page.until("document.querySelector('#verdict').innerText !== ''")
    await page.until("document.querySelector('#hour').textContent.startsWith('The cluster from')")
    await seen(page, "tasks", "big")
    await seen(page, "incidents", "process_exit")
    await page.js("document.querySelector('tr.click').click()")
    await page.until("document.querySelector('#story .account').textContent.startsWith('Incident i')")
    await seen(page, "goodput", "failure-free")
    await page.until("document.querySelectorAll('#waterfall i').length >= 2")
    await seen(page, "ranks", "rank 0")
    await seen(page, "log", "shown of")
    await page.until("document.querySelectorAll('.log > div').length > 5")


async def test_page_shows_live_cluster(tmp_path: Path) -> None:
    async with serving(tmp_path, list(healed_cluster().log)) as served, browsing() as page:
        await page.open(served.url + "/")
        await page.until("document.querySelector('#health').innerText.startsWith('live')")
        await walked(page)
        # What is in the log a moment later is on the page without being asked for.
        await page.js("location.hash = 'log'")
        await cordoned_by_the_page(page, served)
        await page.until("document.querySelector('#main').innerText.includes('a test wants it')")
        # Another view does not take the focus of the one before: a key is no text in its filter.
        await page.js("location.hash = 'cluster'")
        await page.until("document.querySelector('#main input[type=search]') !== null")
        await page.js("document.querySelector('#main input[type=search]').focus(); location.hash = 'log'")
        await page.until("document.querySelector('#filter') !== null")
        assert await page.js("document.activeElement === document.body")
        await acknowledged_by_the_page(page, served)
        # Keys choose views, a phone has room, nothing came from elsewhere, nothing went wrong.
        await page.key("1")
        await page.until("location.hash === '#cluster'")
        await page.size(390, 800)
        assert await page.js("document.documentElement.scrollWidth") <= 400
        assert {url.split("/")[2] for url in page.requests if url.startswith("http")} == {served.url.split("/")[2]}
        assert page.errors == []


async def test_first_view_says_what_to_do_and_ranks_open_on_a_task_that_lives(tmp_path: Path) -> None:
    """The task that came first was cancelled; another's program raises again and again."""
    cluster = healed_cluster()
    cluster.append(v.TaskCancelled(task="big", reason="test"), "api", cluster.state.term)
    cluster.run()
    cluster.submit("typo", max_workers=1)
    cluster.run()
    for _ in range(2):
        end(cluster, "typo")
        cluster.run()
    async with serving(tmp_path, list(cluster.log)) as served, browsing() as page:
        await page.open(served.url + "/")
        await page.until("document.querySelector('#verdict').innerText.includes('typo crash-looping (2 times')")
        await page.until("document.querySelector('#verdict').innerText.includes('unicronctl logs typo')")
        for name in (*cluster.state.nodes, "small"):
            await page.until(f"document.querySelector('#main').innerText.includes({name!r})")
        await seen(page, "ranks", "rank 0")
        assert await page.js("document.querySelector('#main a[aria-current=true]').innerText") in ("small", "typo")
        await seen(page, "plan", "Should this come next")
        lines = await page.js("document.querySelector('#main').innerText.split('\\n').map((line) => line.trim())")
        assert "0" not in lines, "a condition is no text"
        assert page.errors == []


async def test_page_shows_gpu_types(tmp_path: Path) -> None:
    """The page shows each node's type, and each task's where the nodes have several."""
    cluster = with_task(types_of(1, 2, 1))
    async with serving(tmp_path, list(cluster.log)) as served, browsing() as page:
        await page.open(served.url + "/")
        await page.until("document.querySelector('#health').innerText.startsWith('live')")
        await page.js(FIND_N2.replace("n2", "fast0"))
        await page.until(f"document.querySelector('#main').innerText.includes('2 slots of {FAST}')")
        column = "[...document.querySelectorAll('#main table')].some((one) => one.innerText.includes(%r))"
        await page.js("location.hash = 'tasks'")
        await page.until(column % FAST)
        await seen(page, "plan", f"big 4 on {SLOW}")
        assert await page.js(column % f"\t{FAST}"), "of the plan that is"
        assert page.errors == []


async def cordoned_by_the_page(page: Page, served: Served) -> None:
    """It asks before it acts."""
    await page.js("location.hash = 'cluster'")
    await page.js(FIND_N2)
    await page.until("[...document.querySelectorAll('button')].some((one) => one.innerText === 'Cordon…')")
    before = served.coordinator.state.seq
    await page.js("[...document.querySelectorAll('button')].find((one) => one.innerText === 'Cordon…').click()")
    await page.until("document.querySelector('dialog').open")
    assert served.coordinator.state.seq == before, "it asks first"
    await page.js("document.querySelector('dialog input[name=reason]').value = 'a test wants it'")
    await page.js("document.querySelector('dialog button[value=yes]').click()")
    await page.until("document.querySelector('dialog').innerText.includes('Ordered at entry')")
    assert served.coordinator.state.nodes["n2"].cordon.active
    await page.js("document.querySelector('dialog button').click(); location.hash = 'log'")


async def acknowledged_by_the_page(page: Page, served: Served) -> None:
    """An alarm stands with its name and a button; once acknowledged it says by whom, and all is well again."""
    await page.js("location.hash = 'cluster'")
    await page.until("document.querySelector('#verdict h2') !== null")
    well = await page.js("document.querySelector('#verdict h2').innerText")
    served.coordinator.add_alarms(lambda: [Alarm("volume-full", "the volume of /var is full", "state")])
    button = "[...document.querySelectorAll('.todo button')].find((one) => one.innerText === 'Acknowledge…')"
    await page.until(f"{button} && document.querySelector('.todo').innerText.includes('/var is full')", 30)
    await page.js(f"{button}.click()")
    await page.until("document.querySelector('dialog').open")
    await page.js("document.querySelector('dialog button[value=yes]').click()")
    await page.until("document.querySelector('dialog').innerText.includes('Ordered at entry')")
    await page.js("document.querySelector('dialog button').click()")
    await page.until("document.querySelector('.todo').innerText.includes('acknowledged by')", 30)
    assert (await page.js("document.querySelector('#verdict h2').innerText")).startswith(well), "it needs nobody now"


async def test_page_recovers_with_coordinator(tmp_path: Path) -> None:
    async with serving(tmp_path, list(healed_cluster().log)) as served, browsing() as page:
        await page.open(served.url + "/#log")
        await page.until("document.querySelector('#health').innerText.startsWith('live')")
        await served.stop()
        await page.until("document.querySelector('#health').innerText.startsWith('no connection')")
        await served.start()
        await page.until("document.querySelector('#health').innerText.startsWith('live')")
        await page.until(
            f"document.querySelector('#health').innerText.includes('term {served.coordinator.state.term}')"
        )


async def test_page_asks_for_token_and_applies_its_scopes(tmp_path: Path) -> None:
    token = make_token()
    (tmp_path / "tokens").write_text(line_of("ann", [Scope.READ], token) + "\n")
    config = Config(api=ApiConfig(tokens_file=str(tmp_path / "tokens")))
    async with serving(tmp_path, list(healed_cluster().log), config=config) as served, browsing() as page:
        await page.open(served.url + "/")
        await page.until("document.querySelector('dialog').open")
        await page.js(f"document.querySelector('dialog input').value = {token!r}")
        await page.js("document.querySelector('dialog button[value=yes]').click()")
        await page.until("document.querySelector('#health').innerText.startsWith('live')")
        await page.js(FIND_N2)
        await page.until("document.querySelector('#main').innerText.includes('This token may not operate.')")


@asynccontextmanager
async def replayed(moments: Moments, prefix: str = "") -> AsyncIterator[str]:
    """The page over a log, behind a path prefix."""
    app = PageServer(moments, "some.log").application()
    if prefix:
        outer = web.Application()
        outer.add_subapp(prefix, app)
        app = outer
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}{prefix}/"
    finally:
        await runner.cleanup()


async def test_replayed_page_has_slider_and_works_behind_prefix() -> None:
    moments = Moments()
    feed_all(moments, troubled(3).log)
    async with replayed(moments, "/some/where") as url, browsing() as page:
        await page.open(url)
        await page.until("document.querySelector('#health').innerText.startsWith('replay of some.log')")
        await walked(page)
        whole = await page.js("document.querySelector('#health').innerText")
        await page.js(
            "const s = document.querySelector('#slider'); s.value = 3000; s.dispatchEvent(new Event('input'))"
        )
        await page.until(f"document.querySelector('#health').innerText !== {whole!r}")
        await page.js("location.hash = 'plan'")
        await page.js("document.querySelector('#whatif button').click()")
        await page.until("document.querySelector('#main').innerText.includes('the change would cost')")
        assert page.errors == []


def test_moment_matches_fold() -> None:
    moments, log = Moments(), troubled(3).log
    feed_all(moments, log)
    for count in (len(log), 3, 0, len(log) // 2, len(log) // 2 + 1):
        assert moments.after(count).state.seq == count
