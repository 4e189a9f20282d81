# SPDX-License-Identifier: Apache-2.0
"""Divide a model's parameters between Muon and an elementwise optimizer, by an explicit rule."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, overload

import torch
from torch import nn

from vescale.fsdp.optim.checks import check_function

Named = tuple[str, nn.Parameter]
NamedParams = Iterable[Named]
Predicate = Callable[[str, nn.Parameter], bool | None]

_HEAD_NAMES = frozenset({"lm_head", "head", "output"})
_EMBEDDING_NAMES = frozenset({"wte", "wpe"})


@overload
def split_params(
    model: nn.Module | NamedParams,
    *,
    predicate: Predicate | None = ...,
    named: Literal[False] = ...,
    verbose: bool = ...,
) -> tuple[list[nn.Parameter], list[nn.Parameter]]: ...


@overload
def split_params(
    model: nn.Module | NamedParams,
    *,
    predicate: Predicate | None = ...,
    named: Literal[True],
    verbose: bool = ...,
) -> tuple[list[Named], list[Named]]: ...


def split_params(
    model: nn.Module | NamedParams,
    *,
    predicate: Predicate | None = None,
    named: bool = False,
    verbose: bool = False,
) -> tuple[list[Any], list[Any]]:
    """Return ``(muon_params, rest)``: every parameter once, in the model's order.

    Hidden matrices go to Muon. To ``rest``, which suits AdamW, go

    - every parameter that is not 2-D: norms, biases, convolutions, fused experts;
    - embeddings: the weight of an ``nn.Embedding`` or ``nn.EmbeddingBag``, and a parameter whose
      name, or whose module's name, contains "embed" or is ``wte`` or ``wpe``;
    - heads: a parameter named, or of a module named, ``lm_head``, ``head`` or ``output``, unless
      its path contains a number: ``layers.3.attention.output.weight`` is a hidden matrix;
    - tied weights, if any of their names is one of the above.

    Works on sharded parameters too: DTensors have global shapes, and the modules keep their types.
    Frozen parameters follow the same rule; leave them out of the optimizer to save their traffic.

    Args:
        model: a module, or ``(fqn, parameter)`` pairs such as ``model.named_parameters()``. Pairs
            carry no modules, so embeddings are known by name only, and ties only if all names of
            the parameter are given (``remove_duplicate=False``).
        predicate: ``predicate(fqn, param)``, asked with the first name of each parameter; True
            sends it to Muon, False to ``rest``, None leaves it to the rule.
        named: return ``(fqn, parameter)`` pairs. Optimizers take them too, and keep the names:
            ``Muon(matrix_split=...)`` and the stochastic rounding of ``AdamW8bit`` go by names.
        verbose: print one line for each parameter: where it went, its shape, name and reason.

    Raises TypeError for parameters without names.
    """
    names: dict[nn.Parameter, list[str]] = {}
    embeddings: set[nn.Parameter] = set()
    if isinstance(model, nn.Module):
        embeddings.update(_embedding_weights(model))
        model = model.named_parameters(remove_duplicate=False)
    if not isinstance(model, Iterable):
        raise _no_pairs(model)
    check_function("predicate", predicate, "(fqn, param) that returns True, False or None")
    for pair in model:
        if not _is_pair(pair):
            raise _no_pairs(pair)
        fqn, param = pair
        names.setdefault(param, []).append(fqn)

    muon_params: list = []
    rest: list = []
    for param, fqns in names.items():
        choice = predicate(fqns[0], param) if predicate is not None else None
        reason: str | None = "predicate"
        if choice is None:
            reason = _reason_for_rest(param, fqns, param in embeddings)
            choice = reason is None
        (muon_params if choice else rest).append((fqns[0], param) if named else param)
        if verbose:
            place = "muon" if choice else "rest"
            print(f"{place}  {tuple(param.shape)!s:>16}  {fqns[0]}  ({reason or 'hidden matrix'})")
    return muon_params, rest


def _is_pair(given: object) -> bool:
    if not isinstance(given, tuple) or len(given) != 2:
        return False
    return isinstance(given[0], str) and isinstance(given[1], torch.Tensor)


def _no_pairs(given: object) -> TypeError:
    what = f"a {type(given).__name__}"
    if isinstance(given, tuple):
        what += f" of ({', '.join(type(item).__name__ for item in given)})"
    return TypeError(
        f"split_params got {what}, expected a module or (name, parameter) pairs; "
        "pass the model, or model.named_parameters()."
    )


def _embedding_weights(model: nn.Module) -> Iterator[nn.Parameter]:
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            yield module.weight  # type: ignore[misc]  # a Parameter


def _reason_for_rest(param: nn.Parameter, fqns: list[str], is_embedding: bool) -> str | None:
    if param.ndim != 2:
        return f"{param.ndim}-D"
    if is_embedding or any(_is_embedding_name(fqn) for fqn in fqns):
        return "embedding"
    if any(_is_head_name(fqn) for fqn in fqns):
        return "head"
    return None


def _is_embedding_name(fqn: str) -> bool:
    return any("embed" in name or name in _EMBEDDING_NAMES for name in _last_names(fqn))


def _is_head_name(fqn: str) -> bool:
    in_layer = any(part.isdigit() for part in fqn.split("."))
    return not in_layer and not _HEAD_NAMES.isdisjoint(_last_names(fqn))


def _last_names(fqn: str) -> list[str]:
    """Return the name of the parameter and that of the module that owns it, in lower case."""
    return fqn.lower().split(".")[-2:]
