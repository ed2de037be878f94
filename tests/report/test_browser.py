"""The page in Chromium: what a reader sees and does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lmcache_stream.report import write_report

from .conftest import Opened, Page
from .making import SNAPKV, failed_row, night, row, write_job

pytestmark = pytest.mark.browser

PHONE = {"width": 390, "height": 844}
HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'><b>bold</b>"
LONG = "Donaudampfschifffahrtsgesellschaft" * 60


async def page_of(folder: Path, *jobs: list[Any]) -> Path:
    return await asyncio.to_thread(_page_of, folder, *jobs)


def _page_of(folder: Path, *jobs: list[Any]) -> Path:
    outputs = [write_job(folder / f"{number}.jsonl", rows) for number, rows in enumerate(jobs)]
    return write_report(outputs, folder / "report.html").path


@pytest.fixture
async def small(tmp_path: Path) -> Path:
    """Four ids in two runs."""
    pieces = [["Ferries leave ", True], ["at eight ", False], ["from Oban.", True]]
    first = [
        row("doc-1", line=1, text="At eight.", baseline={"text": "At eight.", "ttft": 0.2}, pieces=pieces),
        row(
            "doc-2",
            line=2,
            text="At nine.",
            baseline={"text": "At eight, daily.", "ttft": 0.2},
            extra={"expected": "ten"},
        ),
        failed_row("doc-10", line=10, error={"type": "CacheLostError", "message": "gone", "phase": "decode"}),
    ]
    second = [
        row("doc-1", line=1, text="At eight.", policy="KeyDiff(ratio=0.5)", baseline=None),
        row("doc-3", line=3, text="Never.", policy="KeyDiff(ratio=0.5)", baseline=None),
    ]
    second[1]["metrics"] |= {"ttft": 0.9, "attempts": 5}
    return await page_of(tmp_path, first, second)


async def ids(page: Page) -> list[str]:
    found: list[str] = await page.locator(".items > li .id").all_inner_texts()
    return found


async def status(page: Page, wanted: str) -> None:
    await page.locator(".status", has_text=wanted).wait_for(timeout=3000)


async def test_it_says_what_was_run(open_page: Opened, tmp_path: Path) -> None:
    rows = [row("a"), row("b", text="else"), failed_row("c"), '{"half']
    page = await open_page(await page_of(tmp_path, rows))
    assert await page.locator("h1").inner_text() == SNAPKV
    assert "qwen3" in await page.locator(".eyebrow").inner_text()
    tiles = {
        (await one.inner_text()).split("\n")[0]: await one.inner_text()
        for one in await page.locator(".tile").all()
    }
    assert tiles["Rows"].split("\n")[1] == "3"
    assert tiles["Failed"].split("\n")[1:3] == ["1", "1 EngineStatusError"]
    assert tiles["Retried"].split("\n")[1] == "0"
    assert tiles["Same answer"].split("\n")[1:3] == ["50.0 %", "1 of 2 as from the whole KV"]
    assert tiles["KV kept"].split("\n")[1:] == ["50.0 %", "32 of 64 tokens"]
    assert "1 line of" in await page.locator(".notice").inner_text()
    await page.get_by_label("Search").fill("nowhere")
    await status(page, "No row is like this.")
    await page.locator(".tile", has_text="Failed").get_by_role("button").click()
    assert await ids(page) == ["c"]
    assert await page.get_by_label("Search").input_value() == ""


async def test_charts_have_titles_axes_and_the_figures_as_a_table(open_page: Opened, small: Path) -> None:
    page = await open_page(small)
    ttft = page.locator("figure", has_text="Time to first token")
    assert [" ".join(line.split()) for line in await ttft.locator("tbody tr").all_inner_texts()] == [
        f"A ({SNAPKV}) 2 100 100 100 100",
        "B (KeyDiff(ratio=0.5)) 2 500 500 820 892",
        "whole KV 2 200 200 200 200",
    ]
    texts = await ttft.locator("svg text").all_text_contents()
    assert {"A", "B", "0", "p50", "p90"} <= set(texts)
    assert any(text.startswith("ms (height: rows") for text in texts)
    assert await ttft.locator("svg .bar").count() >= 3
    job = page.locator("figure", has_text="Over the job")
    assert (
        "row, by completion (height: ms, \u00d7: failed)" in await job.locator("svg text").all_text_contents()
    )
    assert await job.locator(".cross").count() == 1


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("All", ["doc-1", "doc-2", "doc-3", "doc-10"]),
        ("Failed", ["doc-10"]),
        ("Differs from whole KV", ["doc-2"]),
        ("Retried", ["doc-3"]),
        ("Runs differ", []),
    ],
)
async def test_filters(open_page: Opened, small: Path, name: str, expected: list[str]) -> None:
    page = await open_page(small)
    await page.get_by_role("radio", name=name).check()
    assert await ids(page) == expected
    shown = f"{len(expected)} of 4 rows" if expected else "No row is like this."
    await status(page, shown)


@pytest.mark.parametrize(
    ("search", "expected"),
    [
        ("DOC-1", ["doc-1", "doc-10"]),
        ("leave from", []),
        ("leave at", ["doc-1"]),
        ("daily", ["doc-2"]),
        ("cachelost", ["doc-10"]),
        ("  never. ", ["doc-3"]),
    ],
)
async def test_search(open_page: Opened, small: Path, search: str, expected: list[str]) -> None:
    page = await open_page(small)
    await page.get_by_label("Search").fill(search)
    await status(page, f"{len(expected)} of 4" if expected else "No row is like this.")
    assert await ids(page) == expected
    await page.get_by_label("Search").fill("")
    await status(page, "4 of 4 rows")


async def test_what_was_searched_for_is_marked_across_kept_and_dropped(
    open_page: Opened, small: Path
) -> None:
    page = await open_page(small)
    await page.get_by_label("Search").fill("LEAVE AT")
    await status(page, "1 of 4")
    await page.locator("summary").first.click()
    await page.locator(".prompt").wait_for()
    found = "[...CSS.highlights.get('found')].map((range) => range.toString())"
    await page.wait_for_function(f"{found}.length > 0")
    assert await page.evaluate(found) == ["leave at"]


async def test_runs_and_order(open_page: Opened, small: Path) -> None:
    page = await open_page(small)
    await page.get_by_label("Run", exact=True).select_option("1")
    assert await ids(page) == ["doc-1", "doc-3"]
    assert await page.locator(".filters .count").all_inner_texts() == ["2", "0", "0", "1", "0"]
    await page.get_by_label("Sort by", exact=True).and_(page.locator("select")).select_option("ttft")
    await page.get_by_role("button", name="ascending").click()
    assert await ids(page) == ["doc-3", "doc-1"]
    await page.get_by_label("Run", exact=True).select_option("")
    await page.get_by_role("button", name="Id", exact=True).click()
    assert await ids(page) == ["doc-1", "doc-2", "doc-3", "doc-10"]
    await page.get_by_role("button", name="Id", exact=True).click()
    assert await ids(page) == ["doc-10", "doc-3", "doc-2", "doc-1"]
    # What has no TTFT stands last in either direction.
    await page.get_by_role("button", name="TTFT", exact=True).click()
    assert (await ids(page))[-1] == "doc-10"
    await page.get_by_role("button", name="TTFT", exact=True).click()
    assert await ids(page) == ["doc-3", "doc-1", "doc-2", "doc-10"]


async def test_a_row_opens_to_its_prompt_answers_and_figures(open_page: Opened, small: Path) -> None:
    page = await open_page(small)
    first = page.locator(".items > li").first
    assert await first.locator(".detail").count() == 0
    await first.locator("summary").click()
    prompt = first.locator(".prompt")
    assert await prompt.inner_text() == "Ferries leave at eight from Oban."
    assert await prompt.locator("del").all_inner_texts() == ["at eight "]
    assert await prompt.locator(".kept").all_inner_texts() == ["Ferries leave ", "from Oban."]
    line = await prompt.locator("del").evaluate("(node) => getComputedStyle(node).textDecorationLine")
    assert line == "line-through"
    assert await first.locator(".answer").all_inner_texts() == ["At eight."] * 3
    # The other run has another prompt.
    await first.get_by_role("button", name="KeyDiff").click()
    assert await prompt.inner_text() == "kept text dropped text kept again"
    await first.get_by_label("hide what was dropped").check()
    assert await prompt.inner_text() == "kept text kept again"
    figures = await first.locator(".detail .figures tr").all_inner_texts()
    assert "TTFT\t100 ms\t100 ms" in figures
    assert "KV tokens, after\t16\t16" in figures


async def test_an_answer_that_differs_is_marked_from_there_on(open_page: Opened, small: Path) -> None:
    page = await open_page(small)
    second = page.locator(".items > li").nth(1)
    await second.locator("summary").click()
    assert await second.locator("mark").all_inner_texts() == ["nine."]
    assert await second.get_by_text("differs from whole KV").count() == 1
    assert await second.get_by_text("not in this run").count() == 1
    assert await second.locator(".extra").inner_text() == "expected\nten"


async def test_a_failed_row_tells_its_error(open_page: Opened, small: Path) -> None:
    page = await open_page(small)
    last = page.locator(".items > li").last
    assert "CacheLostError: gone" in await last.locator("summary").inner_text()
    await last.locator("summary").click()
    assert await last.locator(".error").inner_text() == "CacheLostError in decode\n\ngone"
    assert await last.get_by_text("The text of this prompt is not in the file.").count() == 1


@pytest.fixture(scope="session")
def thousand(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of 1,000 rows with some 1,000 tokens of prompt each."""
    path = _page_of(tmp_path_factory.mktemp("thousand"), night(1000))
    assert path.stat().st_size > 4_000_000
    return path


async def test_a_thousand_rows_open_within_three_seconds(open_page: Opened, thousand: Path) -> None:
    page = await open_page(thousand, is_waiting=False)
    began = time.monotonic()
    await page.goto(thousand.as_uri(), wait_until="commit")
    await page.locator(".items > li").first.wait_for()
    seconds = time.monotonic() - began
    assert seconds < 3
    assert await page.locator(".items > li").count() == 100
    assert await page.locator(".detail").count() == 0
    await page.get_by_role("button", name="Show 100 more of 900").click()
    assert await page.locator(".items > li").count() == 200
    focused = await page.evaluate("document.activeElement.querySelector('.id').textContent")
    assert focused == "doc-100"
    await page.get_by_label("Search").fill("doc-999")
    await status(page, "1 of 1,000 rows")
    assert await ids(page) == ["doc-999"]


@pytest.mark.parametrize("width", [390, 820, 1280])
async def test_nothing_is_wider_than_the_page(open_page: Opened, tmp_path: Path, width: int) -> None:
    rows = [
        row(LONG, text=LONG, model=LONG, baseline={"text": LONG}, pieces=[[LONG, True], [LONG, False]]),
        failed_row("b", model=LONG, error={"type": LONG, "message": LONG, "phase": "decode"}),
    ]
    others = [[row(LONG, policy=f"{LONG}{number}", extra={LONG: LONG})] for number in range(3)]
    page = await open_page(await page_of(tmp_path, rows, *others), viewport={"width": width, "height": 800})
    for summary in await page.locator(".items summary").all():
        await summary.click()
    await page.locator(".prompt").first.wait_for()
    assert await page.evaluate("document.documentElement.scrollWidth") == width


async def test_texts_stay_text(open_page: Opened, tmp_path: Path) -> None:
    bad = row(
        HOSTILE, text=HOSTILE, policy=HOSTILE, model=HOSTILE, finish_reason=HOSTILE,
        pieces=[[HOSTILE, True], [HOSTILE, False]], baseline={"text": "other"}, extra={HOSTILE: HOSTILE},
    )  # fmt: skip
    failed = failed_row(
        "b", policy=HOSTILE, model=HOSTILE, error={"type": HOSTILE, "message": HOSTILE, "phase": HOSTILE}
    )
    page = await open_page(await page_of(tmp_path, [bad, failed], [row(HOSTILE)]))
    for summary in await page.locator(".items summary").all():
        await summary.click()
    await page.locator(".prompt").first.wait_for()
    assert await page.locator("img, b, body script:not(#data):not(:last-of-type)").count() == 0
    assert await page.locator(".prompt .kept").first.inner_text() == HOSTILE
    assert await page.locator(".id").first.inner_text() == HOSTILE
    assert await page.title() == f"{HOSTILE}, compared with 1 more"
    assert await page.evaluate("window.hacked") is None


async def test_a_script_that_got_into_the_page_would_not_run(open_page: Opened, small: Path) -> None:
    page = await open_page(small, is_refused=True)
    refused = await page.evaluate("""() => new Promise((resolve) => {
        const refused = [];
        document.addEventListener('securitypolicyviolation', (event) => {
            refused.push(event.effectiveDirective);
            if (refused.length === 2) resolve(refused.sort());
        });
        const script = document.createElement('script');
        script.textContent = 'window.hacked = 1';
        const image = document.createElement('div');
        document.body.append(script, image);
        image.innerHTML = '<p onclick="window.hacked = 1"></p>';
        image.firstChild.click();
    })""")
    assert refused == ["script-src-attr", "script-src-elem"]
    assert await page.evaluate("window.hacked") is None


async def test_the_keyboard_is_enough(open_page: Opened, small: Path) -> None:
    page = await open_page(small)
    press = page.keyboard.press
    await press("Tab")
    assert await page.evaluate("document.activeElement.textContent") == "Skip to the rows"
    await press("Enter")
    await press("/")
    await page.keyboard.type("at")
    await status(page, "2 of 4 rows")
    while not await page.evaluate("document.activeElement.matches('.items summary')"):
        await press("Tab")
    await press("ArrowDown")
    active = "document.activeElement.querySelector('.id').textContent"
    assert await page.evaluate(active) == "doc-2"
    await press("ArrowUp")
    assert await page.evaluate(active) == "doc-1"
    outline = await page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    await press("Enter")
    await page.locator(".prompt").wait_for()
    # From the row into it: the runs of its prompt, the box to tick, the prompt itself.
    await press("Tab")
    await press("Tab")
    assert await page.evaluate("document.activeElement.getAttribute('aria-pressed')") == "false"
    await press("Space")
    assert await page.evaluate("document.activeElement.getAttribute('aria-pressed')") == "true"
    await press("Tab")
    await press("Space")
    assert await page.get_by_label("hide what was dropped").is_checked()
    await press("Tab")
    assert await page.evaluate("document.activeElement.className") == "prompt only"


CONTRASTS = """() => {
    const found = [];
    const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
    const parse = (text) => {
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = text;
        canvas.fillRect(0, 0, 1, 1);
        const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
        return [r, g, b, a / 255];
    };
    const behind = (node) => {
        for (let each = node; each; each = each.parentElement) {
            const colour = parse(getComputedStyle(each).backgroundColor);
            if (colour[3] > 0.99) return colour;
        }
        return null;
    };
    for (const node of document.querySelectorAll('body *')) {
        if (!node.checkVisibility() || node.closest('script, noscript, .hidden, .skip')) continue;
        if (![...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim())) continue;
        const style = getComputedStyle(node);
        const colour = node.closest('svg') ? style.fill : style.color;
        found.push([node.tagName + '.' + (node.getAttribute('class') || ''), parse(colour), behind(node)]);
    }
    return found;
}"""


def luminance(colour: Sequence[float]) -> float:
    """The relative luminance of WCAG 2."""
    channels = [value / 255 for value in colour[:3]]
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: Sequence[float], other: Sequence[float]) -> float:
    brighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (brighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_every_text_can_be_read(open_page: Opened, tmp_path: Path, scheme: str) -> None:
    jobs: list[list[Any]] = [
        [
            row("a", policy=f"P({number})", text="x" if number else "an answer"),
            failed_row("b", policy=f"P({number})"),
        ]
        for number in range(8)
    ]
    jobs[0].append('{"half')
    page = await open_page(await page_of(tmp_path, *jobs), color_scheme=scheme)
    for summary in await page.locator(".items summary, .notice summary").all():
        await summary.click()
    await page.locator(".prompt").first.wait_for()
    found = await page.evaluate(CONTRASTS)
    assert {"DEL.", "SPAN.kept", "SPAN.chip differs", "SPAN.chip failed", "text.tick"} <= {
        name for name, *_ in found
    }
    paper = await page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(17, 22, 29)"}[scheme]
    default = [255, 255, 255, 1] if scheme == "light" else [17, 22, 29, 1]
    ratios = [(contrast(colour, back or default), name) for name, colour, back in found]
    assert min(ratios)[0] >= 4.5, sorted(ratios)[:5]
    # Bars and strips are no text: WCAG asks for 3.
    for run in range(8):
        fill = await page.evaluate(f"getComputedStyle(document.querySelector('.charts .bar.run-{run}')).fill")
        colour = [float(part) for part in fill.removeprefix("rgb(").removesuffix(")").split(",")]
        assert contrast(colour, default) >= 3
