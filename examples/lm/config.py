# SPDX-License-Identifier: Apache-2.0
"""The options of the example, read and checked without touching a file or a peer."""

import argparse
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from lm.errors import BadInputError
from lm.model import SIZES
from vescale.fsdp.granularity import parse_granularity

LEARNING_RATES = {"muon": 0.01, "adamw": 0.003}


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
    seed: int
    device: str
    threads: int | None
    compare: bool
    tolerance: float | None
    checkpoint_dir: str | None
    checkpoint_every: int | None
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
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    count, number = _positive(int), _positive(float)
    model = parser.add_argument_group("model and text")
    model.add_argument("--model-size", choices=SIZES, default="small", help="size of the decoder")
    model.add_argument("--untied", action="store_true", help="head with weights of its own")
    model.add_argument("--data", metavar="PATH", help="text file or folder; default: Python's")
    model.add_argument("--seq-len", type=count, default=256, metavar="N", help="bytes in a window")
    model.add_argument("--seed", type=_seed, default=0, metavar="N", help="of weights and batches")

    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=count, default=200, metavar="N", help="in total")
    training.add_argument(
        "--batch-size", type=count, default=4, metavar="N", help="windows per rank and step"
    )
    training.add_argument("--optimizer", choices=LEARNING_RATES, default="muon", help="see README")
    training.add_argument(
        "--lr", type=number, metavar="X", help=f"peak; default: by optimizer, {LEARNING_RATES}"
    )
    training.add_argument(
        "--compare", action="store_true", help="train on one process too, and compare the losses"
    )
    training.add_argument(
        "--tolerance", type=number, metavar="X", help="largest relative difference --compare allows"
    )

    sharding = parser.add_argument_group("ranks and sharding")
    sharding.add_argument("--nproc", type=count, metavar="N", help="start N ranks; for no torchrun")
    sharding.add_argument(
        "--granularity", type=_granularity, default="rows:1", help="where a matrix may be cut"
    )
    sharding.add_argument(
        "--param-dtype", choices=("float32", "bfloat16"), default="float32", help="to compute in"
    )
    sharding.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="type")
    sharding.add_argument(
        "--threads", type=count, metavar="N", help="per rank; default: cores by ranks"
    )

    files = parser.add_argument_group("files")
    files.add_argument("--output-dir", default="runs/train_lm", metavar="PATH", help="of results")
    files.add_argument("--checkpoint-dir", metavar="PATH", help="save here at the end")
    files.add_argument("--checkpoint-every", type=count, metavar="N", help="and also every N steps")
    files.add_argument(
        "--no-reload-check",
        dest="reload_check",
        action="store_false",
        help="do not read the last checkpoint back to compare it",
    )
    files.add_argument(
        "--resume", metavar="PATH", help="go on from a checkpoint; auto: the newest, if any"
    )
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
        parse_granularity(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text
