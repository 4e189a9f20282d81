# SPDX-License-Identifier: Apache-2.0
"""The parts of the example that need no ranks: options, text, model, checkpoints on disk."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.checkpoint import find, make_manager
from lm.config import parse_config
from lm.data import Corpus, load_corpus
from lm.errors import BadInputError
from lm.launch import check_nproc
from lm.model import SIZES, Decoder, next_byte_loss
from lm.optimizers import make_optimizers, set_rate
from lm.progress import progress
from lm.reference import compare, train_alone
from vescale.fsdp.checkpoint import folder as on_disk

CPU = torch.device("cpu")
TINY = ("--model-size", "tiny", "--seq-len", "16", "--batch-size", "2", "--steps", "4")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--optimizer", "sgd"], "muon"),
        (["--granularity", "cols:2"], "rows:N"),
        (["--granularity", "rows:0"], "positive"),
        (["--steps", "0"], "no positive integer"),
        (["--lr", "nan"], "no positive number"),
        (["--seed", "-1"], "0 to 2"),
        (["--model-size", "huge"], "tiny"),
        (["--resume", "auto"], "--checkpoint-dir"),
        (["--checkpoint-every", "2"], "--checkpoint-dir"),
        (["--resume", "somewhere", "--compare"], "leave out --resume"),
        (["--step", "2"], "unrecognized"),
    ],
)
def test_options_that_cannot_work_are_refused_in_one_line(options, words):
    with pytest.raises(BadInputError, match=words) as caught:
        parse_config(options)
    assert "\n" not in str(caught.value)


def test_the_learning_rate_follows_the_optimizer_unless_it_is_given():
    assert parse_config(["--optimizer", "muon"]).lr != parse_config(["--optimizer", "adamw"]).lr
    assert parse_config(["--optimizer", "muon", "--lr", "0.5"]).lr == 0.5


def test_the_standard_library_is_there_to_train_on():
    corpus = load_corpus(None, 256, seed=0)
    assert len(corpus.train) > 1_000_000
    assert len(corpus.validation) > 50_000
    assert corpus.batch(5, 3).shape == (3, 257)


def test_a_folder_is_read_in_the_order_of_its_names_without_binary_files(tmp_path):
    for name, text in (("b/2.txt", b"two"), ("b/1.txt", b"one"), ("a.txt", b"zero")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text * 100)
    for name in (".hidden", "b/image.png"):
        (tmp_path / name).write_bytes(b"\0" * 100)
    corpus = load_corpus(str(tmp_path), 8, seed=0)
    text = bytes(torch.cat([corpus.train, corpus.validation]).tolist())
    assert text == b"\n".join([b"zero" * 100, b"one" * 100, b"two" * 100])


def test_text_that_is_missing_or_too_short_is_refused(tmp_path):
    with pytest.raises(BadInputError, match=r"missing\.txt: No such file"):
        load_corpus(str(tmp_path / "missing.txt"), 8, seed=0)
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(BadInputError, match="5 bytes of text, but --seq-len 8 needs at least 180"):
        load_corpus(str(tmp_path), 8, seed=0)


def make_corpus(numel=2000, length=16, seed=0):
    text = torch.arange(numel).remainder(251).byte()
    return Corpus("numbers", text[:-400], text[-400:], length, seed)


@settings(deadline=None, max_examples=25)
@given(st.integers(40, 3000), st.integers(1, 30), st.integers(1, 4), st.integers(0, 5))
def test_one_pass_sees_every_window_once_however_it_is_batched(numel, length, count, seed):
    text = torch.arange(numel + 400).short()  # no two windows are equal
    corpus = Corpus("numbers", text[:numel], text[numel:], length, seed)
    total = corpus.windows
    at_once = corpus.batch(0, total)
    assert sorted(at_once[:, 0].tolist()) == [i * length for i in range(total)]
    assert torch.equal(at_once[:, 1:], at_once[:, :-1] + 1)
    pieces = [corpus.batch(i, min(count, total - i)) for i in range(0, total, count)]
    assert torch.equal(torch.cat(pieces), at_once)
    held_out = corpus.validation_batch(3)
    assert held_out.min() >= numel
    assert held_out.shape == (3, length + 1)


@pytest.mark.parametrize("tied", [True, False])
def test_the_decoder_looks_back_only_and_ties_its_head(tied):
    torch.manual_seed(0)
    model = Decoder(SIZES["tiny"], 16, tied=tied)
    tokens = torch.randint(256, (2, 16))
    changed = tokens.clone()
    changed[:, 10:] = 7
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10:], after[:, 10:])
    assert (model.head.weight is model.embedding.weight) == tied
    assert "rotary" not in model.state_dict()
    # Nothing is learnt yet: every byte is about as likely.
    assert next_byte_loss(model, torch.randint(256, (4, 17))).item() == pytest.approx(
        5.545, abs=0.1
    )


def test_muon_takes_the_matrices_between_embedding_and_head():
    config = parse_config(TINY)
    model = Decoder(SIZES["tiny"], 16, tied=False)
    muon, adamw = make_optimizers(config, model, torch.optim.Muon)
    names = {parameter: name for name, parameter in model.named_parameters()}
    of_muon = {names[p] for group in muon.param_groups for p in group["params"]}
    of_adamw = {names[p] for group in adamw.param_groups for p in group["params"]}
    assert of_muon | of_adamw == set(names.values())
    assert not of_muon & of_adamw
    assert {"embedding.weight", "head.weight", "norm.weight"} <= of_adamw
    assert "layers.1.feed_forward.down.weight" in of_muon

    rates = []
    for step in range(config.steps):
        set_rate((muon, adamw), config, step)
        rates.append({group["lr"] for o in (muon, adamw) for group in o.param_groups})
    assert all(len(rate) == 1 for rate in rates)


@pytest.mark.parametrize(
    ("name", "kinds"), [("adamw", "AdamW"), ("adamw8bit", "AdamW8bit"), ("soap", "SOAP AdamW")]
)
def test_every_optimizer_takes_all_parameters_once(name, kinds):
    config = parse_config([*TINY, "--optimizer", name])
    model = Decoder(SIZES["tiny"], 16, tied=True)
    optimizers = make_optimizers(config, model, torch.optim.Muon)
    assert [type(o).__name__ for o in optimizers] == kinds.split()
    taken = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    assert len(taken) == len(set(taken)) == len(list(model.parameters()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_learns(dtype):
    options = ("--steps", "12", "--lr", "0.02", "--param-dtype", dtype)
    losses = list(train_alone(parse_config([*TINY, *options]), make_corpus(), 2, CPU))
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 0.5


def test_the_comparison_finds_the_largest_difference_and_fails_on_nan():
    config = parse_config([*TINY, "--tolerance", "0.1"])
    difference = compare(config, [1.0, 2.1, 4.0], [1.0, 2.0, 4.1])
    assert (difference.step, difference.acceptable) == (1, True)
    assert difference.largest == pytest.approx(0.05)
    assert not compare(config, [1.0, 3.0], [1.0, 2.0]).acceptable
    broken = compare(config, [1.0, float("nan"), 9.0], [1.0, 1.0, 1.0])
    assert (broken.step, broken.acceptable) == (1, False)


@pytest.fixture
def alone():
    """A process group of this process, which managers of checkpoints need."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def write_checkpoint(folder, step, **changes):
    config = {**dataclasses.asdict(parse_config(TINY)), **changes}
    facts = {"windows": 4 * step, "losses": [5.0] * step, "config": config}
    sequence = on_disk.next_sequence(folder)
    manifest = on_disk.Manifest(step, sequence, 1, facts, {})
    return on_disk.publish(on_disk.start(folder, step), manifest)


def found_by(config):
    return find(config, make_manager(config))


def test_auto_resumes_from_the_newest_complete_checkpoint(tmp_path, alone):
    config = parse_config([*TINY, "--checkpoint-dir", str(tmp_path), "--resume", "auto"])
    assert found_by(config).checkpoint is None
    for step in (1, 3):
        write_checkpoint(tmp_path, step)
    on_disk.start(tmp_path, 4)  # its writer was killed
    (tmp_path / "step-000000005").mkdir()
    found = found_by(config)
    assert (found.checkpoint.path.name, found.step, found.windows) == ("step-000000003", 3, 12)


@pytest.mark.parametrize(
    ("step", "changes", "words"),
    [
        (2, {"model_size": "small"}, "--model-size small, and this run has tiny"),
        (2, {"optimizer": "adamw"}, "--optimizer adamw"),
        (2, {"untied": True}, "--untied True"),
        (4, {}, "4 steps already"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path, step, changes, words, alone):
    path = write_checkpoint(tmp_path, step, **changes)
    with pytest.raises(BadInputError, match=words):
        found_by(parse_config([*TINY, "--resume", str(path)]))


def test_a_missing_or_broken_checkpoint_is_refused(tmp_path, alone):
    (tmp_path / on_disk.MANIFEST).write_text("{")
    for path, words in ((tmp_path, "has a broken"), (tmp_path / "missing", "no complete")):
        with pytest.raises(BadInputError, match=words):
            found_by(parse_config([*TINY, "--resume", str(path)]))


def test_progress_is_told_in_a_few_lines_where_there_is_no_terminal(capsys):
    with progress("training", 0, 1000, CPU, show=True) as report:
        for step in range(1, 1001):
            report(step, 2.5, 1234.0)
    lines = capsys.readouterr().out.splitlines()
    assert 15 <= len(lines) <= 25
    assert lines[-1].startswith("training  step 1000/1000  loss 2.5000     1,234 tokens/s  ")
    with progress("training", 0, 1000, CPU, show=True) as report:
        for step in range(1, 1001):
            report(step, 2.5, 1234.0)
    lines = capsys.readouterr().out.splitlines()
    assert 15 <= len(lines) <= 25
    assert lines[-1].split()[:7] == [
        "training",
        "step",
        "1000/1000",
        "loss",
        "2.5000",
        "1,234",
        "tokens/s",
    ]
    with progress("training", 0, 10, CPU, show=False) as report:
        report(1, 2.5, None)
    assert capsys.readouterr().out == ""


def test_the_commands_of_the_readme_are_understood():
    text = (Path(__file__).parents[1] / "examples/README.md").read_text()
    commands = re.findall(r"^(?:python|torchrun .*) examples/train_lm\.py(.*)$", text, re.MULTILINE)
    assert len(commands) >= 8
    for options in commands:
        parse_config(options.split())


def test_more_ranks_than_the_machine_can_run_are_refused():
    check_nproc(2, "cpu")
    with pytest.raises(BadInputError, match=r"--nproc 100000: this machine has \d+ CPU cores"):
        check_nproc(100_000, "auto")
