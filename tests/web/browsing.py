"""What the tests in a real browser share: a page that notes errors, and its usual gestures."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from axe_playwright_python.base import AXE_SCRIPT
from playwright.sync_api import expect

DESKTOP = {"width": 1280, "height": 800}
expect.set_options(timeout=20_000)
CHECKED: set[str] = set()  # titles of dialogs in which axe-core has looked
MANY = ("tbody tr", ".heat-strip span", ".shards span")  # equal parts: each costs the same


@contextmanager
def opened(browser, url, **options):
    """Give a page of a new profile; in the end, no console error was seen that was not expected.

    Nothing moves on it, unless `reduced_motion` says so: software draws each frame.
    """
    options.setdefault("viewport", DESKTOP)
    options.setdefault("reduced_motion", "reduce")
    context = browser.new_context(**options)
    page = context.new_page()
    page.set_default_timeout(20_000)
    page.expected = []
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
    unexpected = [error for error in errors if not any(one in error for one in page.expected)]
    assert not unexpected, unexpected


def expects(page, *statuses):
    """Expect console errors: that the server answers with a status, or 0: that it does not."""
    for status in statuses:
        page.expected.append(f"status of {status}" if status else "net::ERR_")


def heading(page, text):
    expect(page.get_by_role("heading", level=1)).to_have_text(text)


def press(page, name, **options):
    page.get_by_role("button", name=name, **options).click()


def confirm(page, name):
    """Press the button of the open dialog, in which axe-core finds nothing serious."""
    dialog = page.get_by_role("dialog")
    title = dialog.get_by_role("heading").inner_text()
    if title not in CHECKED:
        CHECKED.add(title)
        check_accessibility(page, within="dialog")
    dialog.get_by_role("button", name=name).click()


def told(page, text):
    expect(page.locator(".toast").filter(has_text=text).last).to_be_visible()


def sign_in(page, token):
    page.get_by_label("Token").fill(token)
    press(page, "Sign in")


def elsewhere(call, *arguments, **options):
    """Call a function on another thread: the browser's driver has an event loop in this one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call, *arguments, **options).result()


def check_accessibility(page, within="html", *, dark=True):
    """Check that axe-core finds nothing serious in a part of a page, light and `dark`."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE_SCRIPT)
    assert serious_problems(page, within) == [], page.url
    if dark:  # which changes colours, and nothing else
        page.emulate_media(color_scheme="dark")
        assert serious_problems(page, within, runOnly=["color-contrast"]) == [], page.url
        page.emulate_media(color_scheme="light")


def serious_problems(page, within, **options):
    """Return what axe-core finds, without what is moderate or minor.

    It looks at the first three of many equal parts.
    """
    options |= {"resultTypes": ["violations"], "preload": False}
    where = {"include": [within], "exclude": [f"{each}:nth-child(n+4)" for each in MANY]}
    found = page.evaluate("([where, options]) => axe.run(where, options)", [where, options])
    return [
        (one["id"], node["html"][:150], node["any"][0]["message"] if node["any"] else "")
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"]
    ]
