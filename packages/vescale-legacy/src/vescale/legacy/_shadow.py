# SPDX-License-Identifier: Apache-2.0
"""Refuse to be imported beside another package called ``vescale``, and say what to do.

``vescale`` is a namespace package: nothing owns ``vescale/__init__.py``. The distribution vescale
0.0.1 of 2024 does, and files under ``vescale/dtensor`` that vescale-dtensor has too. Whichever
was installed last wrote those, so what is imported may be a mixture. Importing this module
checks, and changes nothing. Each package has its own copy, as it may be unable to find another.
"""

import importlib.util
import sys
from types import ModuleType

REINSTALL = "pip install --force-reinstall --no-deps vescale-dtensor"


def check_namespace(package: ModuleType) -> None:
    """Raise ``ImportError`` unless ``package``, the imported ``vescale``, is a namespace.

    Also when ``vescale.dtensor`` has no ``__init__.py``, as after ``pip uninstall vescale``,
    which deletes the shared files, ours or not.
    """
    owner = getattr(package, "__file__", None)
    if owner is not None:
        raise ImportError(
            f"{owner} makes `vescale` one package, which hides vescale.dtensor, vescale.fsdp and "
            "vescale.legacy or mixes up their files; they need a `vescale` without __init__.py. "
            "The file most likely belongs to the old distribution vescale 0.0.1: run "
            f"`pip uninstall vescale`, then `{REINSTALL}`, since the two share files. If it is in "
            "a checkout, take that off PYTHONPATH.",
            name=package.__name__,
            path=owner,
        )
    spec = importlib.util.find_spec(f"{package.__name__}.dtensor")
    if spec is not None and spec.origin is None:
        raise ImportError(
            f"{list(spec.submodule_search_locations or ())} has no __init__.py, so "
            "vescale.dtensor is incomplete, as `pip uninstall vescale` leaves it; run "
            f"`{REINSTALL}`.",
            name=spec.name,
        )


check_namespace(sys.modules["vescale"])
