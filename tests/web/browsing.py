"""What the tests in a real browser share: a page that notes errors, and its usual gestures."""

import re
from contextlib import contextmanager

from playwright.sync_api import expect

DESKTOP = {"width": 1280, "height": 800}
expect.set_options(timeout=20_000)
EXPECTED = re.compile(
    r"status of (401|403|404|409|412|422|503)"
    r"|ERR_CONNECTION_REFUSED|ERR_INCOMPLETE_CHUNKED|ERR_EMPTY"
)


@contextmanager
def opened(browser, url, **options):
    """Give a page of a new profile; in the end, no console error was seen.

    Nothing moves on it, unless `reduced_motion` says so: software draws each frame.
    """
    options.setdefault("viewport", DESKTOP)
    options.setdefault("reduced_motion", "reduce")
    context = browser.new_context(**options)
    page = context.new_page()
    page.set_default_timeout(20_000)
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("dialog", lambda dialog: errors.append(f"dialog {dialog.message}"))
    page.on(
        "console",
        lambda line: line.type == "error" and errors.append(f"{line.text} {line.location}"),
    )
    page.on("request", lambda one: url in one.url or errors.append(f"foreign {one.url}"))
    page.root = url
    page.go = lambda path: page.goto(f"{url}/{path}")
    yield page
    context.close()
    unexpected = [error for error in errors if not EXPECTED.search(error)]
    assert not unexpected, unexpected


def heading(page, text):
    expect(page.get_by_role("heading", level=1)).to_have_text(text)


def press(page, name, **options):
    page.get_by_role("button", name=name, **options).click()


def confirm(page, name):
    """Press the button of the open dialog."""
    page.get_by_role("dialog").get_by_role("button", name=name).click()


def told(page, text):
    expect(page.locator(".toast").filter(has_text=text).last).to_be_visible()
