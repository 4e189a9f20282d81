# SPDX-License-Identifier: Apache-2.0
"""Write the pages of the documentation site: ``python -m tools.site [FOLDER]``.

They are Markdown still, for the builder that mkdocs.yml configures; ``nox -s docs`` runs both.
"""

import shutil
import sys
from pathlib import Path

from tools import site_api, site_pages

ROOT = Path(__file__).parents[1]
COPIED = (".svg", ".png", ".css")


def pages() -> dict[str, str]:
    """Return the text of every page by its path on the site."""
    docs = [path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("docs/**/*.md"))]
    sources = {path: (ROOT / path).read_text() for path in (*docs, *site_pages.OUTSIDE)}
    found = {site_pages.site_path(p): site_pages.convert(t, p) for p, t in sources.items()}
    for page, text in sources.items():
        for path in site_pages.targets(text, page):
            place = site_pages.site_path(path)
            if place.startswith("source/") and (ROOT / path).is_file():
                found[place] = site_pages.listing(path, (ROOT / path).read_text())
    for module in site_api.names():
        found[f"reference/api/{module}.md"] = site_api.page(module)
    return found


def write(folder: Path) -> int:
    """Write all pages and what they show into ``folder``, emptied first; return their number."""
    shutil.rmtree(folder, ignore_errors=True)
    found = pages()
    for place, text in found.items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_text(text)
    for path in ROOT.glob("docs/**/*"):
        if path.suffix in COPIED:
            place = folder / path.relative_to(ROOT / "docs")
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, place)
    return len(found)


if __name__ == "__main__":
    place = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "site/pages"
    print(f"{write(place)} pages in {place}")
