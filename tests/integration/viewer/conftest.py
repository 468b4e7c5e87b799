"""A viewer over a file with a bit of everything, and one browser for all tests."""

import os
import shutil

import pytest
import pytest_asyncio
from playwright.async_api import async_playwright

from gymrl.viewer import ViewerOptions, open_viewer
from tests.integration.viewer.sample import write_sample


@pytest.fixture
def sample(tmp_path):
    """The file."""
    return write_sample(tmp_path / "rollouts.jsonl")


@pytest.fixture
async def viewer(sample):
    """A viewer over the sample, without a tokenizer."""
    async with open_viewer(sample, ViewerOptions(poll_s=0.02)) as viewer:
        yield viewer


def find_chromium():
    """The browser to test with; its absence fails where the tests have to be whole."""
    found = os.environ.get("GYMRL_CHROMIUM") or shutil.which("chromium")
    if found is None:
        message = "there is no Chromium: run scripts/chromium"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return found


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser():
    """One headless Chromium."""
    executable = find_chromium()
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=executable,
            # Root has no sandbox, and a container's /dev/shm is small.
            args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"],
        )
        yield browser
        await browser.close()
