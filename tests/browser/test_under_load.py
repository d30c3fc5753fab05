"""The live page while the demo's pair answers several people at once: what is seen then, and pictures of it."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.serving import Served, demo_served

PROMPTS = (
    "Write a Python function that returns the factorial of a number.",
    "List five fruits that are yellow.",
    "Tell me a short story about a lighthouse.",
)
QUESTION = "Write a Python function that returns the largest number in a list."
MOST_BYTES = 300_000  # of a picture in the documents


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with demo_served("model.dtype=bfloat16") as served:
        yield served


@pytest.fixture
def load(served: Served) -> Iterator[None]:
    """Some requests at a time, one after the other, until the test is over."""
    is_over = threading.Event()

    def ask(prompt: str) -> None:
        while not is_over.is_set():
            served.client.chat.completions.create(
                model=served.config.model.name,
                messages=[{"role": "user", "content": prompt}],
                max_tokens=64,
                temperature=0,
            )

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in PROMPTS]
    for thread in threads:
        thread.start()
    yield
    is_over.set()
    for thread in threads:
        thread.join()


def test_under_load_the_page_shows_both_pools_at_work(browser: Any, served: Served, load: None, pictures: Path) -> None:
    context = browser.new_context(viewport={"width": 1100, "height": 1350})
    page = context.new_page()
    page.set_default_timeout(120_000)
    page.goto(served.url)
    page.get_by_label("Prompt").fill(QUESTION)
    page.get_by_label("Most tokens").fill("96")
    page.get_by_role("button", name="Ask").click()
    page.locator("#tally", has_text="tokens in").wait_for()
    page.locator("#acceptance li").first.wait_for()
    page.wait_for_timeout(12_000)  # of speed, for its curve
    assert page.locator("#answer .accepted").count() > 10
    replaced = page.locator("#answer .replaced")
    assert replaced.count() > 3
    replaced.nth(2).hover()
    assert page.locator("#rejected del").text_content()
    assert page.locator("#gantt rect.verify").count() > 5
    assert page.locator("#gantt rect.draft, #gantt rect.ahead").count() > 5
    page.get_by_label("hold still").check()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        picture = page.screenshot(path=pictures / f"page_{scheme}.png", full_page=True)
        assert len(picture) < MOST_BYTES
    context.close()
