# SPDX-License-Identifier: Apache-2.0
"""Turn the Markdown of this repository, as GitHub shows it, into pages of the site. Pure text.

The files in docs/ stay what a reader of the repository sees. What differs on the site is made here:
links to files outside of docs/, the words after a fence's language that say how a block is tested,
and indentation in lists, of which Python-Markdown wants four spaces.
"""

import posixpath
import re
from pathlib import Path

# Pages from outside of docs/, by their path in the repository: where they are on the site.
OUTSIDE = {
    "README.md": "project/overview.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "RELEASING.md": "project/releasing.md",
    "SECURITY.md": "project/security.md",
    "examples/README.md": "project/example.md",
    **{
        f"packages/vescale-{name}/{file}.md": f"project/{name}-{file.lower()}.md"
        for name in ("dtensor", "fsdp", "legacy")
        for file in ("README", "CHANGELOG")
    },
}
LANGUAGES = {".py": "python", ".toml": "toml", ".yml": "yaml", ".sh": "bash"}
FENCE = re.compile(r"^( *)```([^`\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\]\()([^)\s]+)(\))")


def site_path(path: str) -> str:
    """Return where a file of the repository is on the site, both with forward slashes."""
    if path in OUTSIDE:
        return OUTSIDE[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}.md"  # a listing, made by ``listing``


def targets(text: str, path: str) -> list[str]:
    """Return the files of the repository that the page at ``path`` links to."""
    links = [match[2].partition("#")[0] for match in LINK.finditer(FENCE.sub("", text))]
    return [_resolve(link, path) for link in links if link and not _foreign(link)]


def convert(text: str, path: str) -> str:
    """Return the page at ``path`` of the repository as the site shows it."""
    blocks: list[str] = []

    def keep(match: re.Match[str]) -> str:
        blocks.append(_fence(match))
        return f"{match[1]}\x00{len(blocks) - 1}\x00"

    text = indent_lists(LINK.sub(lambda m: _link(m, path), FENCE.sub(keep, text)))
    return re.sub(r"( *)\x00(\d+)\x00", lambda m: _indent(blocks[int(m[2])], m[1]), text)


def indent_lists(text: str) -> str:
    """Give what belongs to list items, indented by 2 or 3 spaces, the 4 that it needs.

    Items get an empty line before them where they follow a paragraph.
    """
    lines: list[str] = []
    inside = loose = False  # in a list; in an item of several paragraphs
    for line in text.split("\n"):
        spaces = len(line) - len(line.lstrip())
        after_text = bool(lines and lines[-1])
        if not line.strip():
            loose = inside
        elif item := re.match(r"(?:[-*]|(\d+)\.) ", line):
            if after_text and (loose or (not inside and item[1] in (None, "1"))):
                lines.append("")
            inside, loose = inside or not after_text or item[1] in (None, "1"), False
        elif not spaces:
            inside = inside and after_text and not loose
            loose = loose and inside
        lines.append(f"{'    ' if inside and spaces in (2, 3) else line[:spaces]}{line.lstrip()}")
    return "\n".join(lines)


def listing(path: str, text: str) -> str:
    """Return a page that shows a source file."""
    language = LANGUAGES.get(Path(path).suffix, "text")
    return f"# {path}\n\n``````{language}\n{text}\n``````\n"


def _fence(match: re.Match[str]) -> str:
    """Return a block unindented, with the name of its file as title and no other words."""
    indent, (language, *words) = match[1], match[2].split() or ["text"]
    names = [word.removeprefix("file=") for word in words if word.startswith("file=")]
    title = f' title="{names[0]}"' if names else ""
    body = re.sub(f"^{indent}", "", match[3], flags=re.MULTILINE)
    return f"```{language}{title}\n{body}```"


def _indent(block: str, indent: str) -> str:
    return re.sub(r"^(?=.)", indent, block, flags=re.MULTILINE)


def _link(match: re.Match[str], path: str) -> str:
    target, hash_, anchor = match[2].partition("#")
    if not target or _foreign(target):
        return match[0]
    here = posixpath.dirname(site_path(path))
    moved = posixpath.relpath(site_path(_resolve(target, path)), here or ".")
    return f"{match[1]}{moved}{hash_}{anchor}{match[3]}"


def _resolve(target: str, path: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), target))


def _foreign(target: str) -> bool:
    return bool(re.match(r"[a-z]+:", target))
