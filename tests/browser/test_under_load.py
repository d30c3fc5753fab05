"""Tests the live page while the demo pair answers several clients, and takes screenshots."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.demo_data import CONFIG

SERVE = "from serve_app.cli.main import main; main()"
LOCK_STEP = "speculation.schedule=lock_step"  # every step has a block, even on a busy machine
READY = "Slipstream is ready: "
PROMPTS = (
    "Write a Python function that returns the factorial of a number.",
    "List five fruits that are yellow.",
    "Tell me a short story about a lighthouse.",
)
QUESTION = "Write a Python function that returns the largest number in a list."
MAX_PICTURE_BYTES = 300_000  # limit per picture in the documents

pytestmark = pytest.mark.timeout(1500)  # on a busy machine, models take minutes to load


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Serves the demo pair in child processes until the tests end."""
    command = [sys.executable, "-c", SERVE, "serve", str(CONFIG), "--port", "0", "--set", LOCK_STEP]
    environment = os.environ | {"RAY_AUTH_MODE": "disabled"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        line = next((line for line in server.stdout if line.startswith(READY)), None)
        assert line is not None, "the server ended before it was ready"
        yield line.removeprefix(READY).partition("/v1")[0]
        server.terminate()  # not SIGINT, which processes of a script may ignore


@pytest.fixture
def load(url: str) -> Iterator[None]:
    """Keeps several streams of consecutive requests running until the test ends."""
    is_over = threading.Event()
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]

    def ask(prompt: str) -> None:
        messages = [{"role": "user", "content": prompt}]
        body = {"model": model, "messages": messages, "max_tokens": 48, "temperature": 0}
        while not is_over.is_set():
            httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300).raise_for_status()

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in PROMPTS]
    for thread in threads:
        thread.start()
    yield
    is_over.set()
    for thread in threads:
        thread.join()


def test_under_load_the_page_shows_both_pools_at_work(browser: Any, url: str, load: None, pictures: Path) -> None:
    context = browser.new_context(viewport={"width": 1100, "height": 1350})
    page = context.new_page()
    page.set_default_timeout(300_000)
    page.goto(url)
    page.get_by_label("Prompt").fill(QUESTION)
    page.get_by_label("Maximum tokens").fill("96")
    page.get_by_role("button", name="Ask").click()
    page.locator("#tally", has_text="96 tokens in").wait_for()
    page.locator("#acceptance li").first.wait_for()
    page.wait_for_timeout(30_000)  # collects points of the speed curve
    assert page.locator("#answer .accepted").count() > 10
    replaced = page.locator("#answer .replaced")
    assert replaced.count() > 3
    replaced.nth(2).hover()
    assert page.locator("#rejected del").text_content()
    page.locator("#gantt rect.draft").first.wait_for()
    assert page.locator("#gantt rect.verify").count() > 3
    page.get_by_label("pause").check()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        picture = page.screenshot(path=pictures / f"page_{scheme}.png", full_page=True)
        assert len(picture) < MAX_PICTURE_BYTES
    context.close()
