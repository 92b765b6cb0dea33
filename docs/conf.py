"""Sphinx configuration: furo, MyST, and the reference taken from the pure wheels."""

import os

os.environ["TICKWHEEL_PURE"] = "1"  # the docstrings and signatures of the reference behaviour

import tickwheel

project = "tickwheel"
copyright = "the tickwheel authors"  # noqa: A001
author = "the tickwheel authors"
version = release = tickwheel.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["benchmarks"]  # generated, and included by performance.md
nitpicky = True
# No network, so no inventory of Python's own documentation; and type variables have no page.
nitpick_ignore_regex = [
    ("py:.*", r"(collections\.abc|typing|os)\..*|.*\b[A-Z]|Any|Bound|Iterable|Options")
]

myst_enable_extensions = ["colon_fence", "deflist", "tasklist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
default_role = "code"

html_theme = "furo"
html_title = "tickwheel"
html_show_sphinx = False
