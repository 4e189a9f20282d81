# SPDX-License-Identifier: Apache-2.0
"""Names and shapes of a model's parameters, unit by unit, without the model.

From the shapes of published models that come with the package, from a JSON file, or from a Hugging
Face configuration.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "model_shapes"

Params = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that are gathered together, and how many such units follow one another.

    ``params`` are pairs of name and shape, in order. Names are those within the unit.
    """

    name: str
    count: int
    params: Params

    def merged(self, layers: int) -> "tuple[Unit, ...]":
        """Return the units that ``layers`` of this one at a time make; the last may have fewer."""
        if layers == 1 or self.count == 1:
            return (self,)
        whole, rest = divmod(self.count, layers)
        sizes = [(whole, layers)] if whole else []
        sizes += [(1, rest)] if rest else []
        return tuple(
            Unit(
                f"{self.name} x {size}" if size > 1 else self.name,
                count,
                tuple((f"{i}.{name}", shape) for i in range(size) for name, shape in self.params),
            )
            for count, size in sizes
        )


def shipped() -> list[str]:
    """Return the names of the models that come with the package, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def units_of(model: str) -> tuple[Unit, ...]:
    """Return the units of ``model``: a shipped name, or the path of a JSON file or a folder.

    Case and punctuation of a name do not matter, and its end may be left out where that leaves one
    choice; of fused and unfused experts, fused ones are taken. A JSON file has this package's
    format or maps FQNs to shapes; one with ``model_type``, or a folder with such a
    ``config.json``, is a configuration of Hugging Face Transformers, which must be installed.

    Raises ValueError for a model that is none of these, naming those that are shipped.
    """
    path = _path_of(model)
    return shipped_units(_shipped_name(model)) if path is None else _from_file(path)


def name_of(model: str) -> str:
    """Return what ``model`` names: the whole name of a shipped model, or the path of a file.

    Raises ValueError as ``units_of`` does.
    """
    path = _path_of(model)
    return _shipped_name(model) if path is None else str(path)


def _path_of(model: str) -> Path | None:
    path = Path(model).expanduser()
    if path.is_file():
        return path
    inside = path / "config.json"
    if inside.is_file():
        return inside
    if model and path.is_dir() and not any(_matches(model)):
        raise ValueError(
            f"{path} is a folder without a config.json, expected that of a model of Hugging Face "
            "Transformers; pass the folder that has it, a JSON file of shapes, or a model that is "
            f"known here: {', '.join(shipped())}."
        )
    return None


@cache
def shipped_units(name: str) -> tuple[Unit, ...]:
    """Return the units of a shipped model, by its exact name."""
    return _from_document(json.loads((FOLDER / f"{name}.json").read_text()))


def _shipped_name(model: str) -> str:
    for found in _matches(model):
        fused = [name for name in found if not name.endswith("-unfused")]
        if len(fused or found) == 1:
            return (fused or found)[0]
        if found:
            raise ValueError(f"{model!r} could be any of {', '.join(found)}; say which.")
    raise ValueError(
        f"{model!r} is neither a file nor a model that is known here: {', '.join(shipped())}. Pass "
        "one of these, a JSON file of shapes, or a folder with a config.json of Transformers."
    )


def _matches(model: str) -> tuple[list[str], list[str]]:
    """Return the shipped names that are ``model``, and those that begin with it."""
    wanted, names = _plain(model), shipped()
    return (
        [name for name in names if _plain(name) == wanted],
        [name for name in names if wanted and _plain(name).startswith(wanted)],
    )


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _from_file(path: Path) -> tuple[Unit, ...]:
    try:
        document = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(document, dict):
        raise ValueError(f"{path} holds a {type(document).__name__}, expected a JSON object.")
    if "model_type" in document:
        return group_by_layer(_shapes_of_config(path))
    if "units" in document:
        return _from_document(document)
    if path.name == "config.json":
        raise ValueError(
            f"{path} has no model_type, expected a configuration of Hugging Face Transformers; "
            "pass the folder of one, or a JSON file of shapes by another name."
        )
    for name, shape in document.items():
        whole = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
        if not whole:
            raise ValueError(
                f"{path} has {name!r}: {shape!r}, expected a list of integers: the shape of a "
                "parameter."
            )
    return group_by_layer((name, tuple(shape)) for name, shape in document.items())


def _from_document(document: dict[str, Any]) -> tuple[Unit, ...]:
    return tuple(
        Unit(unit["unit"], unit["count"], tuple(_expand(unit["params"])))
        for unit in document["units"]
    )


def _expand(entries: list) -> Iterator[tuple[str, tuple[int, ...]]]:
    for entry in entries:
        if isinstance(entry, dict):
            for number in range(entry["repeat"]):
                prefix = entry["name"].format(i=number)
                for suffix, shape in entry["params"]:
                    yield prefix + suffix, tuple(shape)
        else:
            yield entry[0], tuple(entry[1])


def _shapes_of_config(path: Path) -> Params:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ValueError(
            f"{path} is a configuration of Hugging Face Transformers, which cannot be imported "
            f"({error}); install transformers, or pass a JSON file of shapes."
        ) from error
    import torch

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path.parent))
    return tuple((name, tuple(param.shape)) for name, param in model.named_parameters())


def group_by_layer(params: Iterable[tuple[str, tuple[int, ...]]]) -> tuple[Unit, ...]:
    """Return one unit per numbered module of the outermost list, and one for all that is outside.

    Numbered modules that follow one another with equal names and shapes are one ``Unit`` with a
    count. What is outside, embeddings and heads, comes last, as the unit "root".
    """
    layers: dict[tuple[str, str], list] = {}
    outside = []
    for fqn, shape in params:
        match = re.match(r"(.*?)\.(\d+)\.(.+)", fqn)
        if match:
            layers.setdefault((match[1], match[2]), []).append((match[3], shape))
        else:
            outside.append((fqn, shape))
    units = []
    for (name, content), same in groupby(
        ((name, tuple(content)) for (name, _), content in layers.items())
    ):
        units.append(Unit(name, len(list(same)), content))
    if outside:
        units.append(Unit("root", 1, tuple(outside)))
    return tuple(units)
