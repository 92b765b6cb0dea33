"""The HTML page at `/`: the version that runs, and links."""

from __future__ import annotations

from string import Template

PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>tickwheel</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 42rem; margin: 3rem auto; padding: 0 1rem }
code { background: #8882; padding: .1em .3em; border-radius: 3px }
</style>
</head>
<body>
<h1>tickwheel</h1>
<p>Version $version is running here. The API is described by <a href="openapi.json">OpenAPI</a>;
<a href="healthz">health</a>, <a href="readyz">readiness</a>, <a href="metrics">metrics</a>.</p>
<p>In a terminal, <code>tickwheel top</code> shows the wheels turn.</p>
</body>
</html>
""")


def landing_page(version: str) -> bytes:
    """Return the page as HTML."""
    return PAGE.substitute(version=version).encode()
