# SPDX-License-Identifier: Apache-2.0
"""The options of the example, read and checked without touching a file or a peer."""

import argparse
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from lm.errors import BadInputError
from lm.model import SIZES
from vescale.fsdp.granularity import FORMS, parse_granularity

LEARNING_RATES = {"muon": 0.01, "adamw": 0.003, "adamw8bit": 0.003, "soap": 0.003}
DTYPES = ("float32", "bfloat16")
GATHERED_AS = ("parameters", "int8", "float8")
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Config:
    """One run; field names are those of the options."""

    nproc: int | None
    model_size: str
    untied: bool
    data: str | None
    steps: int
    batch_size: int
    seq_len: int
    optimizer: str
    lr: float
    granularity: str
    param_dtype: str
    gather_as: str
    seed: int
    device: str
    threads: int | None
    compare: bool
    tolerance: float | None
    checkpoint_dir: str | None
    checkpoint_every: int | None
    keep_last: int | None
    reload_check: bool
    resume: str | None
    output_dir: str


def parse_config(arguments: Sequence[str]) -> Config:
    """Return the options of a command line. Raises BadInputError; ``-h`` exits with 0."""
    options = vars(_parser().parse_args(arguments))
    if options["lr"] is None:
        options["lr"] = LEARNING_RATES[options["optimizer"]]
    config = Config(**options)
    if config.compare and config.resume and config.resume != "auto":
        raise BadInputError("--compare starts at the first step; leave out --resume with it.")
    if (config.checkpoint_every or config.resume == "auto") and not config.checkpoint_dir:
        option = "--checkpoint-every" if config.checkpoint_every else "--resume auto"
        raise BadInputError(f"{option} needs a folder: add --checkpoint-dir PATH.")
    return config


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadInputError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="train_lm.py",
        description="Train a byte-level language model with sharded parameters.",
        allow_abbrev=False,
    )
    count, number, default = _positive(int), _positive(float), "(default: %(default)s)"

    model = parser.add_argument_group("model and text")
    add = model.add_argument
    add("--model-size", choices=SIZES, default="small", help=f"size of the decoder {default}")
    add("--untied", action="store_true", help="give the head weights of its own")
    add("--data", metavar="PATH", help="text file or folder (default: Python's own library)")
    add("--seq-len", type=count, default=256, metavar="N", help=f"bytes in a window {default}")
    add("--seed", type=_seed, default=0, metavar="N", help=f"of weights and batches {default}")

    training = parser.add_argument_group("training")
    add = training.add_argument
    add("--steps", type=count, default=200, metavar="N", help=f"in total {default}")
    add("--batch-size", type=count, default=4, metavar="N", help=f"windows per rank {default}")
    add("--optimizer", choices=LEARNING_RATES, default="muon", help=default)
    rates = ", ".join(f"{rate} for {name}" for name, rate in LEARNING_RATES.items())
    add("--lr", type=number, metavar="X", help=f"highest learning rate (default: {rates})")
    add("--compare", action="store_true", help="train in one process too; compare the losses")
    add("--tolerance", type=number, metavar="X", help="relative difference --compare allows")

    sharding = parser.add_argument_group("ranks and sharding")
    add = sharding.add_argument
    add("--nproc", type=count, metavar="N", help="start N ranks here; not needed with torchrun")
    add(
        "--granularity",
        type=_granularity,
        default="auto",
        help=f"{FORMS}, or auto: what the optimizer wants {default}",
    )
    add("--param-dtype", choices=DTYPES, default="float32", help=f"to compute in {default}")
    add(
        "--gather-as",
        choices=GATHERED_AS,
        default="parameters",
        help=f"what layers' weights are sent as; codes have a scale for 32 x 32 of them {default}",
    )
    add("--device", choices=DEVICES, default="auto", help=f"GPUs if there are enough {default}")
    add("--threads", type=count, metavar="N", help="of a rank on CPU (default: cores / ranks)")

    files = parser.add_argument_group("files")
    add = files.add_argument
    add("--output-dir", default="runs/train_lm", metavar="PATH", help=f"for results {default}")
    add("--checkpoint-dir", metavar="PATH", help="save there at the end, and when stopped")
    add("--checkpoint-every", type=count, metavar="N", help="and every N steps")
    add("--keep-last", type=count, metavar="N", help="checkpoints to keep (default: all)")
    add(
        "--no-reload-check",
        dest="reload_check",
        action="store_false",
        help="do not read the last checkpoint back to see whether it gives the same loss",
    )
    add("--resume", metavar="PATH", help="go on from this checkpoint; auto: the newest, if any")
    return parser


def _positive(kind: type[int] | type[float]) -> Callable[[str], int | float]:
    def convert(text: str) -> int | float:
        with contextlib.suppress(ValueError):
            if 0 < kind(text) < 2**63:
                return kind(text)
        what = "integer" if kind is int else "number"
        raise argparse.ArgumentTypeError(f"{text!r} is no positive {what}")

    return convert


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"{text!r} is no integer from 0 to 2**32 - 1")
    return int(text)


def _granularity(text: str) -> str:
    try:
        if text != "auto":
            parse_granularity(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text
