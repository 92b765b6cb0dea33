"""The drawings in docs/images are those of tools/pictures, which asks the code."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PICTURES = runpy.run_path(str(ROOT / "tools" / "pictures"))["PICTURES"]


@pytest.mark.parametrize("name", PICTURES)
def test_a_drawing_is_what_the_tool_draws(name):
    drawn = PICTURES[name]()
    assert (ROOT / "docs" / "images" / name).read_text("utf-8") == drawn, "run tools/pictures"
    assert "<title>" in drawn
    assert re.search(r'<rect width="\d+" height="\d+" rx="12" fill="#f8fafc"/>', drawn)


@pytest.mark.parametrize("name", PICTURES)
def test_a_drawing_is_shown_on_a_page(name):
    pages = (ROOT / "docs").rglob("*.md")
    assert any(f"images/{name})" in page.read_text("utf-8") for page in pages)
