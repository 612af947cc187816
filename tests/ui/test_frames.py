"""The timeline stays smooth with 5,000 sessions: the time between frames, as the browser shows them."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.support import processes
from tests.support.browser import Page

pytestmark = [pytest.mark.ui, pytest.mark.slow, pytest.mark.timeout(600)]

SESSIONS, PER_S = 5000, 100
WARM_UP_S, MEASURED_S = 30, 15
P95_MS_MAX = 50.0
RECORD = """new Promise((done) => {
  const times = [];
  const begin = performance.now();
  const frame = (now) => {
    times.push(now);
    if (now - begin < %d) requestAnimationFrame(frame);
    else done(times);
  };
  requestAnimationFrame(frame);
})"""
COUNT_UPDATES = """(() => {
  window.updatesSeen = 0;
  const parse = JSON.parse;
  JSON.parse = (text, ...rest) => { window.updatesSeen += 1; return parse(text, ...rest); };
})()"""


def gaps(times: list[float]) -> list[float]:
    return sorted(after - before for before, after in itertools.pairwise(times))


async def measured(tab: Page) -> tuple[list[float], float]:
    """Milliseconds between frames, ascending; and updates that came in a second meanwhile."""
    before = await tab.evaluate("window.updatesSeen")
    times = await tab.evaluate(RECORD % (MEASURED_S * 1000))
    after = await tab.evaluate("window.updatesSeen")
    return gaps(times), (after - before) / ((times[-1] - times[0]) / 1000)


@pytest.mark.parametrize("view", ["fit", "rows", "scrolling"])
async def test_frames_with_5000_sessions(tab: Page, tmp_path: Path, view: str) -> None:
    command = ["tests.ui.synthetic", f"--sessions={SESSIONS}", f"--per-s={PER_S}"]
    daemon = processes.start("synthetic", command, tmp_path)
    try:
        await tab.goto(f"{daemon.ready['url']}/ui")
        await tab.evaluate(COUNT_UPDATES)
        await tab.until("document.querySelector('#legend b').textContent !== '0'", "the first picture")
        if view != "fit":
            await tab.click("#rows-more")
        if view == "scrolling":
            await tab.evaluate(
                "setInterval(() => document.querySelector('#timeline').dispatchEvent("
                "new WheelEvent('wheel', {deltaY: 40, cancelable: true})), 50), true"
            )
        await tab.evaluate(f"new Promise((done) => setTimeout(done, {WARM_UP_S * 1000}))")
        found, updates = await measured(tab)
    finally:
        daemon.kill()
    p50, p95 = found[len(found) // 2], found[int(len(found) * 0.95)]
    print(
        f"{view}: {SESSIONS} sessions, {updates:.0f} updates/s: {len(found) / MEASURED_S:.0f} frames/s, "
        f"p50 {p50:.1f} ms, p95 {p95:.1f} ms, worst {found[-1]:.1f} ms"
    )
    assert updates > PER_S * 0.8, "the updates came"
    assert p95 <= P95_MS_MAX
