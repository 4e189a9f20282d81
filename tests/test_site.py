# SPDX-License-Identifier: Apache-2.0
"""How pages of the repository become pages of the site; ``nox -s docs`` builds it."""

import importlib
import re
from pathlib import Path

import pytest

from tools import site, site_api, site_pages

ROOT = Path(__file__).parents[1]
NAV = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]


@pytest.mark.parametrize(
    ("link", "page", "moved"),
    [
        ("../how-to/a.md#b", "docs/tutorials/t.md", "../how-to/a.md#b"),
        ("../README.md#use-it", "docs/index.md", "project/overview.md#use-it"),
        ("docs/index.md", "README.md", "../index.md"),
        ("../../examples/x.py", "docs/how-to/h.md", "../source/examples/x.py.md"),
        ("#here", "README.md", "#here"),
        ("https://example.org/a.md", "README.md", "https://example.org/a.md"),
    ],
)
def test_links_lead_to_where_the_site_has_a_file(link, page, moved):
    assert site_pages.convert(f"See [it]({link}).", page) == f"See [it]({moved})."


def test_words_of_tests_go_and_names_of_files_become_titles():
    text = (
        "```python ranks=2\na = [b](c)\n```\n```python file=train.py\nx\n```\n```bash run\ny\n```"
    )
    assert site_pages.convert(text, "README.md") == (
        '```python\na = [b](c)\n```\n```python title="train.py"\nx\n```\n```bash\ny\n```'
    )


def test_what_belongs_to_a_list_item_is_indented_by_four():
    text = "1. One\n   goes on\n\n   ```bash run\n   a\n     b\n   ```\n\n   More.\n2. Two\n\nEnd."
    assert site_pages.convert(text, "README.md") == (
        "1. One\n    goes on\n\n    ```bash\n    a\n      b\n    ```\n\n    More.\n\n2. Two\n\nEnd."
    )


def test_a_list_may_follow_a_paragraph():
    text = "Some:\n- a\n  goes on\n- b\n\nIn the year\n2026. And so on."
    assert site_pages.convert(text, "README.md") == (
        "Some:\n\n- a\n    goes on\n- b\n\nIn the year\n2026. And so on."
    )


def test_every_page_has_its_place_and_every_place_a_page():
    placed = re.findall(r"[-:] ([\w./-]+\.md)$", NAV, re.MULTILINE)
    readmes = {place for place in site_pages.OUTSIDE.values() if place.endswith("-readme.md")}
    found = {place for place in site.pages() if not place.startswith("source/")} - readmes
    assert sorted(placed) == sorted(found)


def test_the_start_page_links_to_every_page_of_docs():
    linked = set(site_pages.targets((ROOT / "docs/index.md").read_text(), "docs/index.md"))
    pages = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/*/*.md")}
    assert not pages - linked


@pytest.mark.parametrize("module", site_api.names())
def test_reference_pages_name_what_a_module_exports(module):
    found = importlib.import_module(module)
    page = site_api.page(module)
    homes = re.findall(r"^::: ([\w.]+)$", page, re.MULTILINE)
    assert homes
    for where in homes:
        parent, _, name = where.rpartition(".")
        value = getattr(importlib.import_module(parent), name)
        assert value is getattr(found, name), f"{module}.{name} is not {where}"
    for name in site_api.exported(site_api.parse(module)):
        mentioned = f"`{name}`" in page or name in {where.rpartition(".")[2] for where in homes}
        assert mentioned or site_api.source_of(f"{module}.{name}"), f"{module}.{name} is left out"
