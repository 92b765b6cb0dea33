"""`tickwheel consume`: its arguments. What it does is in tests/contracts and tests/consumer."""

import pytest

from tickwheel.cli import exit_codes


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["orders"], "--broker"),
        (["orders", "--broker", "http://localhost"], "a broker's URL is kafka://"),
        (["orders", "--broker", "kafka://"], "must have a host"),
        (["orders", "--broker", "kafka://h?acks=0"], "'acks'"),
        (
            ["orders", "--broker", "kafka://h?session_timeout=no"],
            "'session_timeout' must be from 1 to 3600",
        ),
        (["orders", "--broker", "kafka://user@h"], "user:password"),
        (["", "--broker", "kafka://h"], "name"),
        (["orders", "--broker", "kafka://h", "--delay", "5"], "--delay needs --service"),
        (["orders", "--broker", "kafka://h", "--batch", "0"], "--batch"),
    ],
)
def test_a_wrong_argument_is_a_usage_error(run, words, why):
    ran = run("consume", *words)
    assert ran.code == exit_codes.USAGE
    assert why in ran.err


def test_no_message_shows_the_password_in_the_url(run):
    ran = run("consume", "orders", "--broker", "kafka://me:hush@h/path")
    assert (ran.code, "hush" in ran.err) == (exit_codes.USAGE, False)


def test_a_missing_package_is_named_with_its_extra(run, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tickwheel.consumer.sources.kafka", None)
    ran = run("consume", "orders", "--broker", "kafka://h")
    assert ran.code != 0
    assert "pip install 'tickwheel[kafka]'" in ran.err
