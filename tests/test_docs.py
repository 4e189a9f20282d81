# SPDX-License-Identifier: Apache-2.0
"""Documentation that runs: every Python block, marked commands, what they print, every link.

The word after the language says what happens to a fenced block; CONTRIBUTING.md lists them.
"""

import ast
import multiprocessing
import os
import re
import runpy
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
FOLDERS = ("*.md", "docs/**/*.md", "packages/*/*.md", "examples/*.md", "benchmarks/**/*.md")
PAGES = sorted(page for folder in FOLDERS for page in ROOT.glob(folder))
FENCE = re.compile(r"^( *)```([^`\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
SESSION = re.compile(r"""nox -s ("[^"]+"|'[^']+'|[\w ]+)""")


def name_of(page):
    return str(page.relative_to(ROOT))


def blocks(page):
    """Yield (language, words after it, code) of each fenced block, unindented."""
    for indent, info, body in FENCE.findall(page.read_text()):
        language, *words = info.split() or [""]
        yield language, words, re.sub(f"^{indent}", "", body, flags=re.MULTILINE)


def run(command, folder):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environ = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run_on_ranks(nproc, folder):
    """Run block.py as torchrun would, but from the fork server: seconds less for each block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=enter, args=(r, nproc, port, folder)) for r in range(nproc)]
    for rank in ranks:
        rank.start()
    deadline = time.monotonic() + 120
    for rank in ranks:
        rank.join(max(0, deadline - time.monotonic()))
        rank.kill()
        rank.join()
    printed = "".join((folder / f"rank{rank}.txt").read_text() for rank in range(nproc))
    assert [rank.exitcode for rank in ranks] == [0] * nproc, printed
    return printed


def enter(rank, nproc, port, folder):
    output = os.open(folder / f"rank{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc}
    places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in (names | places).items()}
    runpy.run_path("block.py", run_name="__main__")


def run_python(code, words, folder):
    """Do with a Python block what the words after the language say; return what it prints."""
    match words:
        case []:
            (folder / "block.py").write_text(code)
            return run([sys.executable, "block.py"], folder)
        case [word] if word.startswith("ranks="):
            (folder / "block.py").write_text(code)
            return run_on_ranks(int(word.removeprefix("ranks=")), folder)
        case [word] if word.startswith("file="):
            compile(code, word, "exec")
            (folder / word.removeprefix("file=")).write_text(code)
        case ["fragment"]:
            tree = ast.parse(code)
            imports = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
            run([sys.executable, "-c", "\n".join(map(ast.unparse, imports))], ROOT)
        case ["before"]:  # what to change from: shown, and only read here
            ast.parse(code)
        case _:
            raise AssertionError(f"```python {' '.join(words)}: see CONTRIBUTING.md")
    return ""


def check_syntax(language, code, folder):
    """Read a script or a manifest as its program would, and run nothing."""
    if language == "bash":
        run(["bash", "-n", "-c", code], folder)
    else:
        assert all("kind" in part for part in yaml.safe_load_all(code))


def shape(line):
    """Return a line of output without what differs from machine to machine: its numbers."""
    return re.sub(r"\s+", " ", re.sub(r"[\d,]*\d(\.\d+)?(e[+-]\d+)?", "#", line)).strip()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_run_in_order(page, tmp_path):
    printed = ""
    for language, words, code in blocks(page):
        if language == "python":
            printed = run_python(code, words, tmp_path)
        elif words[:1] and words[0].startswith("file=") and language in ("bash", "yaml"):
            (tmp_path / words[0].removeprefix("file=")).write_text(code)
            check_syntax(language, code, tmp_path)
        elif language == "bash" and words == ["run"]:
            printed = run(["bash", "-euo", "pipefail", "-c", code], tmp_path)
        elif (language, words) == ("text", ["output"]):
            known = {shape(line) for line in printed.splitlines()}
            missing = [line for line in code.splitlines() if shape(line) not in known]
            assert not missing, f"{page.name} shows lines that the block above no longer prints"
        elif (language, words) == ("text", ["exact"]):
            wrong = [line for line in code.splitlines() if line not in printed.splitlines()]
            assert not wrong, f"{page.name} shows what the block above does not print: {wrong}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    text = FENCE.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"https?:", target):
            path, _, anchor = target.partition("#")
            found = page.parent / path if path else page
            assert found.exists(), f"{target} leads nowhere"
            if anchor:
                heads = re.findall(r"^#+ (.+)$", found.read_text(), re.MULTILINE)
                slugs = [
                    re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in heads
                ]
                assert anchor in slugs, f"{target}: no such heading among {slugs}"


def test_commands_name_sessions_that_exist():
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    sessions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    named = {
        (name_of(page), word.partition("(")[0])
        for page in PAGES
        for words in SESSION.findall(page.read_text())
        for word in ([words.strip("\"'")] if "(" in words else words.split()[:1])
    }
    assert ("README.md", "tests") in named
    assert not {(page, name) for page, name in named if name not in sessions}


def test_the_readme_opens_with_two_commands():
    commands = [code for language, _, code in blocks(ROOT / "README.md") if language == "bash"]
    assert commands[:2] == ["pip install nox\nnox -s demo\n", "pip install nox\nnox -s tests\n"]


@pytest.mark.parametrize(
    "script",
    [p for p in sorted(ROOT.glob("docs/pictures/*.py")) if p.stem != "style"],
    ids=lambda script: script.stem,
)
def test_pictures_are_drawn_anew(script, tmp_path):
    run([sys.executable, script, tmp_path], ROOT)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"{script.stem.replace('_', '-')}.{kind}" for kind in ("png", "svg")]
    for name in names:
        assert (script.parent / name).exists(), f"commit {name} as {script.name} draws it"


@pytest.mark.parametrize(
    "script", sorted(ROOT.glob("docs/reference/write_*.py")), ids=lambda script: script.stem
)
def test_reference_pages_are_up_to_date(script, tmp_path):
    run([sys.executable, script, tmp_path], ROOT)
    (page,) = tmp_path.iterdir()
    written = (script.parent / page.name).read_text()
    assert page.read_text() == written, f"run `python {script.relative_to(ROOT)}`, and commit"


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = [
        p for kind in ("how-to", "explanation", "tutorials") for p in ROOT.glob(f"docs/{kind}/*.md")
    ]
    missing = [page.name for page in pages if f"{page.parent.name}/{page.name}" not in navigation]
    assert not missing, f"add them to nav in mkdocs.yml: {missing}"


@pytest.mark.parametrize("page", sorted(ROOT.glob("packages/*/README.md")), ids=name_of)
def test_paths_that_a_package_names_are_there(page):
    named = re.findall(r"`(docs/[^`\s]+)`", page.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []
