"""The documents and files of the dashboard: where they are, and how they are protected."""

import gzip
import re

import pytest

from tickwheel.web.pages import FOLDER, PATHS, file_named

PAGES = [path.replace("{id}", "0" * 32).replace("{name}", "mail") for path in PATHS if path]


def test_every_page_is_the_same_document_with_its_own_base(api):
    for path in PAGES:
        answer = api.get(path, status=200)
        assert answer.media == "text/html"
        depth = path.count("/") - 1
        assert f'<base href="{"../" * depth or "./"}">'.encode() in answer.body


def test_the_policy_allows_nothing_inline_and_nothing_from_elsewhere(api):
    policy = api.get("/", status=200).headers["content-security-policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["frame-ancestors"] == "'none'"
    assert {rules[name] for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
    assert "unsafe" not in policy


def test_no_file_names_another_site():
    for file in FOLDER.iterdir():
        addresses = set(re.findall(rb"https?://[^\s\"'`)]+", file.read_bytes()))
        assert addresses <= {b"http://www.w3.org/2000/svg"}, file.name


def test_every_file_that_the_document_and_the_scripts_name_is_served(api):
    document = api.get("/").body.decode()
    names = set(re.findall(r'(?:href|src)="(static/[^"]+)"', document))
    for file in FOLDER.iterdir():
        if file.name.endswith(".js"):
            imports = re.findall(r'from "\./([^"]+)"', file.read_text("utf-8"))
            names |= {f"static/{name}" for name in imports}
    assert len(names) > 8
    for name in names:
        answer = api.get(f"/{name}", status=200)
        assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", ["/", "/lab"])
def test_a_document_names_every_module_so_that_all_load_at_once(api, path):
    named = re.findall(r'"modulepreload" href="static/([^"]+)"', api.get(path).body.decode())
    scripts = [(FOLDER / name).read_text("utf-8") for name in named]
    imported = {name for text in scripts for name in re.findall(r'from "\./([^"]+)"', text)}
    assert imported
    assert imported <= {*named}


def test_a_file_is_sent_once_and_compressed(api):
    plain = api.get("/static/tickwheel.css", status=200)
    packed = api.get("/static/tickwheel.css", headers={"accept-encoding": "gzip, br"}, status=200)
    assert packed.headers["content-encoding"] == "gzip"
    assert gzip.decompress(packed.body) == plain.body
    known = {"if-none-match": plain.headers["etag"]}
    again = api.get("/static/tickwheel.css", headers=known, status=304)
    assert again.body == b""


@pytest.mark.parametrize("name", ["dashboard.html", "nothing.js", "..", "%2e%2e%2fpages.py", "a"])
def test_nothing_else_is_served(api, name):
    api.get(f"/static/{name}").refused(404, "not_found")


def test_names_that_are_asked_for_are_not_kept(api):
    for number in range(100):
        api.get(f"/static/file-{number}.js").refused(404, "not_found")
    assert file_named.cache_info().currsize <= len([*FOLDER.iterdir()])


def test_below_a_prefix_the_paths_are_relative_to_it(api):
    def ask(path):
        sent = []

        async def receive():
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        scope = {
            "type": "http", "method": "GET", "path": path, "root_path": "/jobs/ui",
            "query_string": b"", "headers": [(b"host", b"127.0.0.1:7380")], "scheme": "http",
        }  # fmt: skip
        api.run(api.app(scope, receive, send))
        return sent[0]["status"], dict(sent[0]["headers"]), sent[1]["body"]

    status, headers, _ = ask("/jobs/ui")
    assert (status, headers[b"location"]) == (308, b"ui/")
    assert b'<base href="./">' in ask("/jobs/ui/")[2]
    assert b'<base href="../">' in ask("/jobs/ui/services/mail")[2]
    assert ask("/jobs/ui/v1/session")[0] == 200
