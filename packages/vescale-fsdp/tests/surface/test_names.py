# SPDX-License-Identifier: Apache-2.0
"""Every public name of FSDP2 is here, with its arguments; the page that lists them is checked."""

import inspect
import re
from pathlib import Path

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch.distributed.fsdp._fully_shard import __all__ as NAMES

import vescale.fsdp

PAGE = Path(__file__).parents[4] / "docs" / "reference" / "fsdp2-surface.md"
# What is missing, and why. A name that is there must not be listed.
MISSING: dict[str, str] = {}
# Names since 2.15, which are here on every version.
LATER = (
    "GradientReductionHandle",
    "FSDPModule.finalize_backward",
    "FSDPModule.set_keep_unsharded_storage",
    "FSDPModule.set_manual_backward_finalization",
)
COMPARISONS = [
    text
    for path in sorted(Path(__file__).parents[1].glob("**/test_*.py"))
    if path != Path(__file__)
    and re.search(r"testing.side_by_side|torch.distributed.fsdp", text := path.read_text())
]


def methods():
    return sorted(
        name
        for name, value in vars(torch_fsdp.FSDPModule).items()
        if inspect.isfunction(value) and (not name.startswith("_") or name.endswith("_op"))
    )


def surface():
    """Yield (name, torch's object or None, ours or None)."""
    later = {name for name in LATER if "." not in name}
    for name in sorted({*NAMES, *later}):
        yield name, getattr(torch_fsdp, name, None), getattr(vescale.fsdp, name, None)
    later = {name.partition(".")[2] for name in LATER} - {""}
    for name in sorted({*methods(), *later}):
        theirs = getattr(torch_fsdp.FSDPModule, name, None)
        yield f"FSDPModule.{name}", theirs, getattr(vescale.fsdp.FSDPModule, name, None)


def parameters(function):
    return inspect.signature(inspect.unwrap(function)).parameters


def test_every_name_is_here_with_its_arguments_and_defaults():
    missing = set()
    for name, theirs, ours in surface():
        if ours is None:
            missing.add(name)
            continue
        if theirs is None or inspect.isclass(theirs):
            continue
        mine = parameters(ours)
        for key, parameter in parameters(theirs).items():
            if key not in mine:
                missing.add(f"{name}({key})")
                continue
            assert mine[key].kind == parameter.kind, f"{name}({key})"
            if parameter.default is not inspect.Parameter.empty:
                assert mine[key].default == parameter.default, f"{name}({key})"
        extra = [p for key, p in mine.items() if key not in parameters(theirs)]
        assert all(p.default is not inspect.Parameter.empty for p in extra), name
    here = {name for name, *_ in surface()}
    # An older torch has fewer names.
    expected = {name for name in MISSING if name.partition("(")[0] in here}
    assert missing == expected


def compared(name):
    """Tell whether a test module that runs FSDP2 too uses ``name``."""
    used = re.compile(rf"\b{re.escape(name.rpartition('.')[2])}\b")
    return any(used.search(text) for text in COMPARISONS)


def row(name, theirs, ours):
    if ours is None:
        return f"| `{name}` | no | {MISSING[name]} |"
    if ours is theirs:
        doc = "PyTorch's own class."
    else:
        doc = inspect.getdoc(ours).partition("\n\n")[0].replace("\n", " ").replace("``", "`")
    here = "yes" if compared(name) else "untested"
    if doc.startswith("Raise NotImplementedError"):
        here = "no"
    return f"| `{name}` | {here} | {doc} |"


OPENING = """\
# FSDP2's names in vescale.fsdp

Every public name of `torch.distributed.fsdp`'s `fully_shard` API, of PyTorch 2.15, and whether it
is here, whichever PyTorch is installed. "yes" also means that tests which run FSDP2 beside ours use
it, most of them on one script for both: losses, gradients, numbers of collectives, and which
parameters are whole when. Written by `packages/vescale-fsdp/tests/surface/test_names.py`.

| name | here | what it does |
|---|---|---|
"""


def page():
    return OPENING + "\n".join(row(*names) for names in surface()) + "\n"


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="PyTorch 2.11 and 2.12 lack more names of the page"
)
def test_the_page_is_up_to_date():
    assert PAGE.read_text() == page(), f"run: python {Path(__file__).name}"


def test_every_method_is_compared_with_fsdp2():
    there = [name for name, _, ours in surface() if ours is not None]
    assert [name for name in there if not compared(name)] == []


if __name__ == "__main__":
    PAGE.write_text(page())
