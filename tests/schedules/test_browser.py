"""The page in headless Chromium: no error, hovering and keys tell figures, zooming zooms."""

from __future__ import annotations

import re
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image

from remat.analysis.compare import sweep
from remat.analysis.plan_report import report
from remat.formats import bytes_text
from remat.schedules.timeline import timeline
from remat.solver import solve_within
from tests.files.hostile import SCRIPT, plan_with_names
from tests.remat.cli.conftest import Remat, written
from tests.schedules.conftest import Planned
from tests.solver.graphs.random_graphs import chain

ZOOM = "echarts.getInstanceByDom(document.getElementById('{}')).getOption().dataZoom[0]"


class Opened:
    """A page, and what went wrong in it."""

    def __init__(self, tab: Any) -> None:
        self.tab, self.wrong = tab, list[str]()
        tab.on("console", lambda said: self.wrong.append(said.text))
        tab.on("pageerror", lambda error: self.wrong.append(str(error)))
        tab.on("request", self._asked)

    def _asked(self, request: Any) -> None:
        if not request.url.startswith(("file:", "data:")):
            self.wrong.append(request.url)

    def box(self, name: str) -> dict[str, float]:
        element = self.tab.locator(f"#{name}")
        element.scroll_into_view_if_needed()
        return element.bounding_box()

    def zoom(self, name: str) -> tuple[float, float]:
        found = self.tab.evaluate(ZOOM.format(name))
        return found["start"], found["end"]


@pytest.fixture(scope="module")
def file(planned: Planned, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    report(planned.graph, planned.result, path)
    return path


@pytest.fixture(
    scope="module", params=["light", pytest.param("dark", marks=pytest.mark.slow), "phone"]
)
def screen(request: pytest.FixtureRequest, browser: Any) -> Iterator[Opened]:
    """A tab that the tests of a screen share: another one would compile the page's scripts anew."""
    width = 390 if request.param == "phone" else 1200
    scheme = "dark" if request.param == "dark" else "light"
    tab = browser.new_page(viewport={"width": width, "height": 850}, color_scheme=scheme)
    tab.set_default_timeout(600_000)
    yield Opened(tab)
    tab.close()


@pytest.fixture
def opened(screen: Opened, file: Path) -> Iterator[Opened]:
    """The page as it is when it is opened."""
    screen.tab.goto("about:blank")
    screen.wrong.clear()
    screen.tab.goto(file.as_uri())
    yield screen
    assert screen.wrong == []


def run_in(text: str) -> int:
    found = re.search(r"run (\d+) of \d+", text)
    assert found is not None, text
    return int(found[1]) - 1


def test_hovering_tells_op_module_line_and_live_bytes(opened: Opened, planned: Planned) -> None:
    line = timeline(planned.graph, planned.schedule)
    for name, share in (("memory", 0.35), ("memory", 0.5), ("memory", 0.75), ("ribbon", 0.6)):
        box = opened.box(name)
        x, y = box["x"] + share * box["width"], box["y"] + 0.5 * box["height"]
        opened.tab.mouse.move(x, y, steps=4)
        tip = opened.tab.locator(f"#{name} div", has_text="live").last
        tip.wait_for(timeout=600_000)
        said = tip.inner_text()
        run = run_in(said)
        op = line.op_of(run)
        assert f"{bytes_text(int(line.live_bytes[run]))} live" in said
        assert op.name in said
        assert op.target in said
        assert op.module in said
        assert Path(op.source).name in said


def test_keys_move_read_and_zoom(opened: Opened, planned: Planned) -> None:
    line = timeline(planned.graph, planned.schedule)
    said = opened.tab.locator("#memory-said")
    opened.tab.locator("#memory").focus()
    assert run_in(said.inner_text()) == line.peak_run
    assert bytes_text(line.simulation.peak_bytes) in said.inner_text()
    opened.tab.keyboard.press("ArrowRight")
    assert run_in(said.inner_text()) == line.peak_run + 1
    opened.tab.keyboard.press("Home")
    assert run_in(said.inner_text()) == 0
    opened.tab.keyboard.press("End")
    assert run_in(said.inner_text()) == len(line) - 1
    opened.tab.keyboard.press("p")
    assert run_in(said.inner_text()) == line.peak_run
    largest = planned.graph.value_by_name[line.simulation.held_at_peak[0]]
    assert f" {bytes_text(largest.size_bytes)} " in said.inner_text()
    opened.tab.keyboard.press("+")
    start, end = opened.zoom("memory")
    assert end - start == pytest.approx(50, abs=0.1)
    opened.tab.keyboard.press("0")
    assert opened.zoom("memory") == (0, 100)


def test_dragging_zooms_and_the_button_shows_all(opened: Opened) -> None:
    box = opened.box("memory")
    y = box["y"] + 0.5 * box["height"]
    opened.tab.mouse.move(box["x"] + 0.4 * box["width"], y)
    opened.tab.mouse.down()
    opened.tab.mouse.move(box["x"] + 0.5 * box["width"], y, steps=5)
    opened.tab.mouse.move(box["x"] + 0.6 * box["width"], y, steps=5)
    opened.tab.mouse.up()
    start, end = opened.zoom("memory")
    assert 5 < end - start < 50
    opened.tab.get_by_role("button", name="Show all").click()
    assert opened.zoom("memory") == (0, 100)


def test_bands_change_and_all_is_drawn(opened: Opened) -> None:
    names = "echarts.getInstanceByDom(document.getElementById('memory')).getOption().series"
    by_kind = [one["name"] for one in opened.tab.evaluate(names)]
    assert {"this plan", "unmodified", "resident", "activation"} <= set(by_kind)
    opened.tab.get_by_label("by module").check()
    assert "blocks.*.attn" in [one["name"] for one in opened.tab.evaluate(names)]
    for name in ("memory", "ribbon", "front"):
        assert opened.tab.locator(f"#{name} canvas").count() >= 1


def test_the_charts_keep_their_names_and_roles(opened: Opened) -> None:
    for name, role in (("memory", "application"), ("ribbon", "application"), ("front", "img")):
        element = opened.tab.locator(f"#{name}")
        assert element.get_attribute("role") == role
        assert len(element.get_attribute("aria-label")) < 80


def test_nothing_is_wider_than_the_screen(opened: Opened) -> None:
    width = opened.tab.evaluate("document.documentElement.scrollWidth")
    assert width <= opened.tab.viewport_size["width"]


def test_sizes_are_rounded_as_in_the_tables(browser: Any, tmp_path: Path) -> None:
    graph = chain(8, unit=256)
    result = solve_within(graph, 1 << 60, "store_all")
    assert result.schedule is not None
    report(graph, result, tmp_path / "report.html")
    live = timeline(graph, result.schedule).live_bytes.tolist()
    assert any(size % 1024 == 256 for size in live)
    tab = browser.new_page()
    tab.goto((tmp_path / "report.html").as_uri())
    tab.locator("#memory").focus()
    tab.keyboard.press("Home")
    for size in live:
        assert f" {bytes_text(size)} live;" in tab.locator("#memory-said").inner_text()
        tab.keyboard.press("ArrowRight")
    tab.close()


def test_the_page_follows_the_colour_scheme(browser: Any, file: Path) -> None:
    tab = browser.new_page(color_scheme="light")
    page = Opened(tab)
    tab.goto(file.as_uri())
    ink = "getComputedStyle(document.body).color"
    light = tab.evaluate(ink)
    tab.emulate_media(color_scheme="dark")
    dark = tab.evaluate(ink)
    assert dark != light
    tab.goto(file.as_uri())
    assert tab.evaluate(ink) == dark
    assert page.wrong == []
    tab.close()


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The last lines that `remat run` prints, as one, and the report of the plan that it keeps."""
    folder = tmp_path_factory.mktemp("ran")
    plan, page = folder / "plan.json", folder / "report.html"
    printed = written(plan, "run", "--budget", "70%").stdout.rstrip().rpartition("\n\n")[2]
    done = Remat()("report", str(plan), "--place", "-o", str(page))
    assert done.exit_code == 0, done.stderr
    return " ".join(printed.split()), page


SEEN = """() => {
    const box = (name) => document.querySelector(name).getBoundingClientRect();
    return Object.fromEntries(["h1", "figure", "line.budget"].map((name) => [name, box(name)]));
}"""
SCROLLED = """() => [...document.querySelectorAll("*")].filter(
    (one) => ["auto", "scroll"].includes(getComputedStyle(one).overflowX)).length"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
def test_the_first_screen_is_the_verdict_and_the_picture(
    browser: Any, ran: tuple[str, Path], width: int, height: int, scheme: str
) -> None:
    printed, path = ran
    tab = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    page = Opened(tab)
    tab.goto(path.as_uri())
    assert tab.locator("main > :first-child").inner_text() == printed
    assert re.fullmatch(
        r"Fits \S+ \wiB\. \S+ % slower than unmodified \(measured: \S+ %.*\), proved .*best plan\. "
        r"28 of 28 gradients equal\.", printed
    )  # fmt: skip
    boxes = tab.evaluate(SEEN)
    for name, box in boxes.items():
        assert box["top"] >= 0, name
        assert box["bottom"] <= height, name
        assert 0 <= box["left"] < box["right"] <= width, name
    assert boxes["h1"]["bottom"] <= boxes["figure"]["top"]
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate(SCROLLED) == 0
    line = boxes["line.budget"]
    colour = tab.evaluate("getComputedStyle(document.querySelector('line.budget')).stroke")
    shot = Image.open(BytesIO(tab.screenshot())).convert("RGB")
    drawn = [
        f"rgb{shot.getpixel((x, round(line['top']) + dy))}" == colour
        for dy in (-1, 0, 1)
        for x in range(int(line["left"]) + 1, width)
    ]
    assert sum(drawn) > width / 2  # a dashed line that nothing covers
    assert page.wrong == []
    tab.close()


def test_names_run_nothing_in_the_page(browser: Any, tmp_path: Path) -> None:
    made = plan_with_names(SCRIPT)
    assert made.graph is not None
    result = solve_within(made.graph, 1 << 40, "store_all")
    front = msgspec.structs.replace(
        sweep(made.graph, ["90%"], ["chen_sqrt"]).fronts["chen_sqrt"], solver=SCRIPT
    )
    path = tmp_path / "report.html"
    report(made.graph, result, path, fronts={SCRIPT: front})
    tab = browser.new_page(viewport={"width": 1200, "height": 850})
    page, said = Opened(tab), list[str]()
    tab.on("dialog", lambda dialog: (said.append(dialog.message), dialog.dismiss()))
    tab.goto(path.as_uri())
    for name in ("memory", "ribbon"):
        tab.locator(f"#{name}").focus()
        for _ in range(3):
            tab.keyboard.press("ArrowRight")
    box = page.box("front")
    for i in range(20):
        tab.mouse.move(box["x"] + box["width"] * i / 20, box["y"] + box["height"] / 2)
    assert "alert(1)" in tab.locator("#memory-said").inner_text()
    assert "alert(1)" in tab.locator("#memory").inner_text()
    assert tab.locator("img").count() == 0
    assert said == page.wrong == []
    tab.close()
