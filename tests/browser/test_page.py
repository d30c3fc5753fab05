"""Tests the live page in a real browser: mouse, keyboard, light and dark themes."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from cluster.errors import TargetLostError
from cluster.routing.ledger import Ended
from protos.messages import Finish
from tests.integration.scripted_front import Front, scripted_front
from tests.scripted_generator import STALL

# Returns the lowest contrast ratio of any text on the page to its painted background.
MIN_CONTRAST = """() => {
  const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const luminance = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, index) => sum + c * [0.2126, 0.7152, 0.0722][index], 0);
  const paper = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = channels(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const texts = [...document.querySelectorAll("body *")].filter((element) => !element.closest(":disabled")
    && element.checkVisibility() && [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim()));
  return texts.map((element) => {
    const lights = [channels(getComputedStyle(element).color), paper(element)].map(luminance).sort((a, b) => b - a);
    return [(lights[0] + 0.05) / (lights[1] + 0.05), element.outerHTML.slice(0, 80)];
  }).sort((a, b) => a[0] - b[0])[0];
}"""


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with scripted_front() as front:
        yield front


@pytest.fixture
def page(browser: Any, front: Front) -> Iterator[Any]:
    """Opens the page; fails on errors, and on requests to other servers."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    faults: list[str] = []
    asked: set[str] = set()
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda request: asked.add(urlsplit(request.url).netloc))
    page.goto(front.url)
    yield page
    context.close()
    front.doorkeeper.key = None
    assert faults == []
    assert asked == {urlsplit(front.url).netloc}


def answered(front: Front) -> None:
    """Scripts two blocks: the first has two accepted tokens and a rejected one, the second no accepted token."""
    front.plays(
        [
            front.emit("abX", accepted=2, rejected="c"),
            front.emit("Y", rejected="x\nz"),
            front.emit("<i>"),
            Ended(Finish.STOP),
        ]
    )


def test_chat_shows_the_answer_and_the_origin_of_its_tokens(page: Any, front: Front) -> None:
    answered(front)
    page.get_by_label("Prompt").fill("")
    page.get_by_label("Prompt").press_sequentially("What now?")
    page.get_by_role("button", name="Ask").click()
    page.get_by_text("done: 7 tokens").wait_for()
    assert page.locator("#answer").text_content() == "abXY<i>"
    assert page.locator("#answer .accepted").all_text_contents() == ["a", "b"]
    assert page.locator("#answer .replaced").all_text_contents() == ["X", "Y"]
    assert (
        "2 drafted and accepted, 5 the target's own, 4 draft tokens rejected" in page.locator("#tally").text_content()
    )
    (generation,) = front.generator.generations[-1:]
    assert "user:What now?;" in front.codec.detokenizer().preview(generation.prompt)


def test_rejected_tokens_are_shown_on_hover(page: Any, front: Front) -> None:
    answered(front)
    page.get_by_role("button", name="Ask").click()
    page.locator("#answer .replaced").first.hover()
    assert page.locator("#rejected").text_content() == "Instead of “X” the draft had “c”."


def test_a_keyboard_is_enough(page: Any, front: Front) -> None:
    """The keyboard moves from the prompt to the answer, and between its rejected drafts."""
    answered(front)
    page.get_by_label("Prompt").focus()
    page.keyboard.press("Control+Enter")
    page.get_by_text("done: 7 tokens").wait_for()
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "answer":
            break
    read = []
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "Home", "End", "ArrowLeft"):
        page.keyboard.press(key)
        read.append(page.locator("#rejected del").text_content())
    assert read == ["c", "x↵z", "x↵z", "c", "x↵z", "c"]


def test_an_answer_can_be_stopped(page: Any, front: Front) -> None:
    front.plays([front.emit("begun"), STALL])
    page.get_by_role("button", name="Ask").click()
    page.get_by_text("begun").wait_for()
    page.get_by_role("button", name="Stop").click()
    page.get_by_text("stopped: 5 tokens").wait_for()
    assert page.get_by_role("button", name="Ask").is_enabled()
    for _ in range(100):
        if not front.generator.running:
            break
        page.wait_for_timeout(50)
    assert not front.generator.running, "the session goes on though nobody reads its answer"


def test_a_broken_answer_states_the_cause(page: Any, front: Front) -> None:
    front.plays([front.emit("begun"), TargetLostError("the target replica failed 3 times")])
    page.get_by_role("button", name="Ask").click()
    page.get_by_text("Failed: the target replica failed 3 times").wait_for()
    assert page.locator("#answer").text_content() == "begun"


def test_request_errors_show_the_servers_message(page: Any, front: Front) -> None:
    page.get_by_label("Maximum tokens").fill("4096")
    page.get_by_role("button", name="Ask").click()
    page.get_by_text("Failed: max_tokens is 4096").wait_for()


def test_the_page_shows_both_pools(page: Any) -> None:
    page.locator("#busy", has_text="50 %").wait_for()
    assert page.locator("#model").text_content() == "toy"
    assert page.locator("#accepted").text_content() == "75 %"
    assert 70 < float(page.locator("#tokens-per-s").text_content()) < 90
    assert page.get_by_role("row", name="target 1 3 1 50 %").count() == 1
    assert page.get_by_role("row", name="drafter 1 3 draft_model").count() == 1
    assert page.locator("#acceptance li").all_inner_texts() == ["80 %\n1", "50 %\n2", "25 %\n3"]
    assert page.get_by_role("img", name="drafter 1: draft 33 % of the time").locator("rect").count() == 20
    assert page.get_by_role("img", name="target 1: verify 33 % of the time").locator("rect").count() == 20


def test_a_prompted_key_is_used_for_later_requests(page: Any, front: Front) -> None:
    front.doorkeeper.key = "right"
    page.get_by_role("dialog").wait_for()
    page.locator("#key").fill("wrong")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.getElementById('key-dialog').open && !document.getElementById('key').value")
    page.locator("#key").fill("right")
    page.get_by_role("button", name="Use it").click()
    answered(front)
    page.get_by_role("button", name="Ask").click()
    page.get_by_text("done: 7 tokens").wait_for()
    assert "Bearer wrong" in front.doorkeeper.shown


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_contrasts_with_its_background(page: Any, front: Front, scheme: str) -> None:
    """WCAG 2.2 level AA requires a contrast ratio of 4.5 to 1 for text."""
    page.emulate_media(color_scheme=scheme)
    answered(front)
    page.get_by_role("button", name="Ask").click()
    page.get_by_text("done: 7 tokens").wait_for()
    page.locator("#answer .replaced").first.hover()
    page.locator("#busy", has_text="50 %").wait_for()
    contrast, where = page.evaluate(MIN_CONTRAST)
    assert contrast >= 4.5, where
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert dark == {"light": "rgb(251, 251, 249)", "dark": "rgb(20, 23, 28)"}[scheme]


def test_a_small_screen_scrolls_down_and_not_aside(page: Any) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    page.locator("#busy", has_text="50 %").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
