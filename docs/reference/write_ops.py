# SPDX-License-Identifier: Apache-2.0
"""Write ops.md from the dispatch tables: ``python docs/reference/write_ops.py [FOLDER]``."""

import importlib
import sys
from collections import defaultdict
from pathlib import Path

import torch

from vescale.dtensor.ops.foreach import foreach, foreach_inplace
from vescale.dtensor.ops.loss import LOSSES
from vescale.dtensor.ops.norm import NORMS
from vescale.dtensor.ops.pointwise import SHAPED_ALIKE
from vescale.dtensor.ops.random import RANDOM
from vescale.dtensor.ops.reduce import REDUCTIONS
from vescale.dtensor.ops.view import VIEWS

# The package exports the function ``dispatch`` under the module's name.
dispatch = importlib.import_module("vescale.dtensor.ops.dispatch")

aten = torch.ops.aten
MAKING = {
    *SHAPED_ALIKE,
    aten.alias.default,
    aten.clone.default,
    aten.detach.default,
    aten.empty_like.default,
    aten.full_like.default,
    aten.lift_fresh.default,
    aten.ones_like.default,
    aten.zeros_like.default,
    aten._to_copy.default,
}
ELEMENTS, LISTS, REFUSED = "Element by element", "Lists of tensors", "refused"
TABLES = {
    "Make, copy, cast, fill": MAKING,
    "Norms": NORMS,
    "Reductions": REDUCTIONS,
    "Views": VIEWS,
    "Losses": LOSSES,
    "Random numbers": RANDOM,
}
TEXTS = {
    ELEMENTS: "The result is laid out as the operands are. Operands of one call are cut alike, or "
    "replicated, or scalars;\ninside whole rows they broadcast. No communication.",
    LISTS: "What foreach and fused optimizers call; each tensor as above.",
    "Make, copy, cast, fill": "`copy_` moves data where the two placements differ; `_to_copy` is "
    "`x.to(...)`.",
    "Reductions": "Over all dims, or over some. One all-reduce for each mesh axis that cuts what\n"
    "is reduced, and none where the reduced dims lie inside whole rows. `max` and `min` are those\n"
    "of all elements: with a dim they would return indices, which `amax` and `amin` do not.\n"
    "`var` and `std` are two reductions, of the values and of their deviations.",
    "Norms": "`_foreach_norm` needs one all-reduce per mesh axis for the whole list.",
    "Views": "The local memory stays; the row-major order does, too. `expand` copies.",
    "Losses": "Element by element, then one of the reductions. The target is cut like the\n"
    "input, or replicated.",
    "Random numbers": "Equal bit by bit to those of one device when all ranks seed alike.\n"
    "Parameters are numbers, or plain tensors that are the same on all ranks.",
}
OPENING = """\
# Operators on ragged tensors

{count} operators of `aten`, overloads counted, run on a tensor with a `RaggedShard`. Operators that
are made of others (`flatten`, `square`, `nn.functional.l1_loss`) run if their parts do. Everything
else raises `NotImplementedError`, which names the operator, the placements and the remedy:
`redistribute` to `Replicate` or `Shard` first, or take `full_tensor()`. A product with a ragged
tensor (`aten.mm`, `nn.functional.linear`) is such a one; its message may name the transposition,
`aten.t`, that comes before. Of the overloads of a name in these tables, those that would need whole
tensors are refused too, such as `index_put_` other than `x[mask] = number`.

No operator but `copy_` moves data silently; what communicates at all is said below, and what it
costs in [What a RaggedShard costs](../explanation/costs-of-ragged-shard.md).

Operators on plain placements are torch's own, whatever this page says. It was written from the
tables of the dispatch, by `docs/reference/write_ops.py`, with torch {torch}.
"""


def kind_of(func) -> str:
    """Return the section that operator ``func`` belongs to."""
    for kind, table in TABLES.items():
        if func in table:
            return kind
    handler = dispatch.classify(func)
    if handler is dispatch.refuse:
        return REFUSED
    return LISTS if handler in (foreach, foreach_inplace) else ELEMENTS


def operators():
    """Yield every operator of aten that this torch has."""
    for full_name in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full_name.partition("::")
        base, _, overload = name.partition(".")
        if namespace == "aten":
            packet = getattr(aten, base, None)
            if packet is not None and (overload or "default") in packet.overloads():
                yield getattr(packet, overload or "default")


def section(kind: str, functions: list) -> str:
    """Return a heading, what holds for the kind, and a table of its operators."""
    forms = defaultdict(set)  # base name -> forms
    names = {func._schema.name.removeprefix("aten::") for func in functions}
    for func in functions:
        name = func._schema.name.removeprefix("aten::")
        inplace = name.endswith("_") and not name.endswith("__")
        base = name[:-1] if inplace and name[:-1] in names else name
        writes_out = any(argument.is_out for argument in func._schema.arguments)
        forms[base].add("out=" if writes_out else "in place" if inplace else "new")
    columns = ("new", "in place", "out=")
    rows = [
        f"| `{base}` | {' | '.join('yes' if form in found else '' for form in columns)} |"
        for base, found in sorted(forms.items())
    ]
    head = "| operator | new tensor | in place | `out=` |\n|---|---|---|---|\n"
    return f"\n## {kind}\n\n{TEXTS[kind]}\n\n{head}" + "\n".join(rows) + "\n"


def page() -> str:
    """Return ops.md."""
    kinds = defaultdict(list)
    for func in operators():
        kinds[kind_of(func)].append(func)
    del kinds[REFUSED]
    count = sum(map(len, kinds.values()))
    version = ".".join(torch.__version__.split(".")[:2])
    order = (*TABLES, ELEMENTS, LISTS)
    opening = OPENING.format(torch=version, count=count)
    return opening + "".join(section(kind, kinds[kind]) for kind in order)


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    (folder / "ops.md").write_text(page())
