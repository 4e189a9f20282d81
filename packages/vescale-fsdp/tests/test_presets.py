# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace

import pytest

from vescale.fsdp import Block, Elements, Rows, granularity_for


def of(choose, fqn, *shape):
    return choose(fqn, SimpleNamespace(shape=shape))


@pytest.mark.parametrize("kind", ["adamw", "muon", "soap"])
def test_optimizers_that_take_any_cut_keep_the_default(kind):
    choose = granularity_for(kind)
    assert of(choose, "w", 512, 512) == Rows(1)
    assert of(choose, "w", 8, 64, 64) == Block(2, 1)
    assert of(choose, "b", 512) == Elements()


def test_8_bit_state_keeps_tiles_whole_where_there_are_any():
    choose = granularity_for("adamw8bit")
    assert of(choose, "w", 512, 512) == Rows(32)
    assert of(choose, "w", 8, 64, 64) == Block(2, 32)
    assert of(choose, "w", 8, 8) == Rows(1)  # float32 state
    assert of(choose, "b", 8192) == Elements()


@pytest.mark.parametrize("kind", ["AdamW", "Muon", "AdamW8bit", "SOAP"])
def test_names_may_be_written_as_the_classes_are(kind):
    chosen, expected = granularity_for(kind), granularity_for(kind.lower())
    assert of(chosen, "w", 512, 512) == of(expected, "w", 512, 512)


def test_heads_and_experts_stay_whole_and_tiles_with_them():
    options = {"heads": {"*.q_proj.weight": 48, "*_proj.weight": 64}, "experts": "*.experts"}
    for kind, head in (("muon", 48), ("adamw8bit", 96)):
        choose = granularity_for(kind, **options)
        assert of(choose, "l.0.q_proj.weight", 96 * 4, 256) == Rows(head)
        assert of(choose, "l.0.k_proj.weight", 128, 256) == Rows(64)
        assert of(choose, "l.0.experts", 8, 64, 128) == Rows(1)
    assert of(granularity_for("adamw8bit", **options), "l.0.experts", 8, 48, 128) == Rows(2)
    assert of(granularity_for("muon", **options), "l.0.experts", 8, 48, 128) == Rows(1)
    assert of(granularity_for("adamw8bit", **options), "l.0.experts", 8, 4, 8) == Rows(1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "Lion"}, "kind='Lion', .*one of adamw, muon, adamw8bit, soap; for others"),
        ({"kind": 3}, "kind=3, expected the name of an optimizer"),
        ({"kind": "muon", "heads": {"*": 0}}, "rows of one head"),
        ({"kind": "muon", "heads": {"*": 3}}, r"w has shape \(4, 4\).*heads of 3 rows"),
        ({"kind": "muon", "experts": ["*"]}, r"w has shape \(4, 4\).*fused experts"),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        of(granularity_for(**options), "w", 4, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 3}, r"heads=3 is a int, expected patterns of names with the rows"),
        ({"heads": ["*.q"]}, r"heads=\['\*.q'\] is a list"),
        ({"experts": 3}, r"experts=3, expected a pattern of names or a list of them"),
        ({"experts": [3]}, r"experts=\[3\], expected a pattern"),
    ],
)
def test_what_is_no_pattern_is_refused(options, message):
    with pytest.raises(TypeError, match=message):
        granularity_for("muon", **options)
