"""The URL parser: valid and invalid URLs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tickwheel.http.url import Target, parse


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("http://a.example", ("http", "a.example", 80, "a.example", "/")),
        ("HTTPS://A.Example/x", ("https", "a.example", 443, "a.example", "/x")),
        ("http://a.example:8080?q", ("http", "a.example", 8080, "a.example:8080", "/?q")),
        ("https://a.example:443/", ("https", "a.example", 443, "a.example", "/")),
        ("http://a.example:443/", ("http", "a.example", 443, "a.example:443", "/")),
        ("http://a.example./", ("http", "a.example.", 80, "a.example.", "/")),
        ("http://127.0.0.1/", ("http", "127.0.0.1", 80, "127.0.0.1", "/")),
        ("http://0x7f.1/", ("http", "0x7f.1", 80, "0x7f.1", "/")),
        ("http://[::1]/", ("http", "::1", 80, "[::1]", "/")),
        ("http://[2001:DB8:0::1]:81/", ("http", "2001:db8::1", 81, "[2001:db8::1]:81", "/")),
        ("http://my_host-1/", ("http", "my_host-1", 80, "my_host-1", "/")),
        ("http://bücher.de/", ("http", "xn--bcher-kva.de", 80, "xn--bcher-kva.de", "/")),
        ("http://a/b//c/../d;e=f", ("http", "a", 80, "a", "/b//c/../d;e=f")),
        ("http://a/%41%zz%4", ("http", "a", 80, "a", "/%41%25zz%254")),
        ("http://a/ä b?<\"x\">", ("http", "a", 80, "a", "/%C3%A4%20b?%3C%22x%22%3E")),
        ("http://a/\\{}|^`[]", ("http", "a", 80, "a", "/%5C%7B%7D%7C%5E%60%5B%5D")),
        ("http://a/@b:c", ("http", "a", 80, "a", "/@b:c")),
        ("http://a/x#part?q", ("http", "a", 80, "a", "/x")),
    ],
)  # fmt: skip
def test_a_url_is_parsed(url, target):
    assert parse(url) == Target(*target)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "a.example",
        "//a.example/",
        "/path",
        "ftp://a.example/",
        "file:///etc/passwd",
        "gopher://a.example/",
        "unix:/socket",
        "http:a.example",
        "http:/a.example",
        "http://",
        "http:///path",
        "http://:80/",
        " http://a.example/",
        "http://a.example /",
        "http://a b/",
        "http://user@a.example/",
        "http://user:secret@a.example/",
        "http://@a.example/",
        "http://a.example\\@b.example/",
        "http://a.example\\b",
        "http://a.example:/",
        "http://a.example:0/",
        "http://a.example:65536/",
        "http://a.example:999999/",
        "http://a.example:-1/",
        "http://a.example:8o/",
        "http://a.example:٨٠/",
        "http://a.example:80:80/",
        "http://a..example/",
        "http://.example/",
        "http://a.example../",
        "http://%61.example/",
        "http://a*b/",
        "http://[::1/",
        "http://::1/",
        "http://[::1]x/",
        "http://[127.0.0.1]/",
        "http://[fe80::1%25eth0]/",
        "http://[fe80::1%eth0]/",
        "http://[]/",
        "http://" + "a" * 64 + "/",
        "http://" + "a." * 127 + "/",
        "http://" + "ü" * 80 + ".example/",
        "http://a.example/\r\nx: y",
        "http://a.example/\x00",
        "http://a.exa\tmple/",
        "http://a.example\n/",
        "http://a.example/\ud800",
        "http://a\uff0fb.example/",
        "http://a\uff20b.example/",
    ],
)
def test_invalid_urls_are_refused(url):
    with pytest.raises(ValueError, match="URL") as caught:
        parse(url)
    assert "secret" not in str(caught.value)


@given(st.text(max_size=60))
def test_no_url_can_inject_a_second_request_line(text):
    for url in (f"http://a.example/{text}", f"http://{text}/", f"http://{text}"):
        try:
            target = parse(url)
        except ValueError:
            continue
        for part in (target.authority, target.path):
            assert part.isascii()
            assert part.isprintable()
            assert " " not in part
