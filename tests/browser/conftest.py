"""Real browser for these tests; skips them if none is installed."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pictures", metavar="FOLDER", help="where pictures of the page under load are to be written")


@pytest.fixture
def pictures(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Returns the folder for screenshots."""
    return Path(request.config.getoption("--pictures") or tmp_path)


@pytest.fixture(scope="module")  # playwright runs an event loop in this thread
def browser() -> Iterator[Any]:
    """Launches Chromium through playwright."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install '.[browser]'")
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"needs a browser, and none of {', '.join(BROWSERS)} is installed: apt install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()
