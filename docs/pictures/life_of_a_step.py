# SPDX-License-Identifier: Apache-2.0
"""Draw one step of a small model, unit by unit, and the memory of the full buffers during it.

The picture shows a step that was recorded, in the file beside this one. ``--record`` runs the model
on two gloo ranks, and writes that file anew.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from style import COLORS, FAINT, INK, save

RECORD = Path(__file__).with_suffix(".json")
UNITS = ("(root)", "layers.0", "layers.1", "layers.2")
LOOKS = {  # category in the trace -> how tall, how far below the middle of its row, color
    "full parameters": (0.66, 0.0, "#dbe3f7"),
    "compute": (0.3, -0.16, COLORS[0]),
    "gather": (0.2, 0.2, COLORS[1]),
    "reduce": (0.2, 0.2, COLORS[2]),
}
GRADIENTS = "#fbb3a6"
KEYS = {
    "full parameters": "full parameters in memory",
    "compute": "forward or backward",
    "gather": "gather, from launch to use",
    "reduce": "reduction",
}


def record() -> dict[str, Any]:
    """Return what rank 0 of two does in the third step: spans, and bytes of full buffers; in ms."""
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_train, (folder,), nprocs=2)
        events = json.loads((Path(folder) / "rank0.json").read_text())["traceEvents"]
        memory = json.loads((Path(folder) / "memory.json").read_text())
    events = [e for e in events if e["ph"] == "X" and e["cat"] in (*LOOKS, "optimizer")]
    start = min(event["ts"] for event in events)
    return {
        "spans": [
            {
                "name": e["name"],
                "kind": e["cat"],
                "from": round((e["ts"] - start) / 1000, 3),
                "to": round((e["ts"] - start + e["dur"]) / 1000, 3),
            }
            for e in sorted(events, key=lambda e: e["ts"])
        ],
        "memory": [[round((at - start) / 1000, 3), params, grads] for at, params, grads in memory],
    }


def _train(rank: int, folder: str) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh

    from vescale.fsdp import fully_shard, inspect

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = nn.Module()
    model.embed, model.head = nn.Embedding(512, 256), nn.Linear(256, 512)
    layer = (256, 4, 1024)
    model.layers = nn.ModuleList(
        nn.TransformerEncoderLayer(*layer, batch_first=True) for _ in range(3)
    )
    model.forward = lambda tokens: model.head(_through(model.layers, model.embed(tokens)))
    for block in model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(512, (4, 64))
    memory = []
    for step in range(3):
        dist.barrier()
        if step < 2:
            _step(model, optimizer, tokens)
            continue
        with _Memory(memory), inspect.record_step(folder):
            _step(model, optimizer, tokens)
    if rank == 0:
        (Path(folder) / "memory.json").write_text(json.dumps(memory))
    dist.destroy_process_group()


def _through(layers: Any, x: Any) -> Any:
    for layer in layers:
        x = layer(x)
    return x


def _step(model: Any, optimizer: Any, tokens: Any) -> None:
    model(tokens).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


class _Memory:
    """Note the bytes of full parameters and of full gradients whenever either changes."""

    def __init__(self, notes: list[list[float]]) -> None:
        self._notes, self._held = notes, {}

    def __enter__(self) -> None:
        from vescale.fsdp.dbuffer import DBuffer

        self._real = DBuffer.allocate_full, DBuffer.free_full
        allocate, free = self._real

        def allocated(buffer: DBuffer) -> Any:
            full = allocate(buffer)
            self._note(buffer, full.nbytes)
            return full

        def freed(buffer: DBuffer) -> None:
            free(buffer)
            self._note(buffer, 0)

        DBuffer.allocate_full, DBuffer.free_full = allocated, freed

    def __exit__(self, *_: object) -> None:
        from vescale.fsdp.dbuffer import DBuffer

        DBuffer.allocate_full, DBuffer.free_full = self._real

    def _note(self, buffer: Any, nbytes: int) -> None:
        if self._held.get(id(buffer), (0, 0))[0] == nbytes:
            return
        self._held[id(buffer)] = nbytes, buffer.slices.tail > 0  # only gradients have flags behind
        sums = [sum(n for n, tail in self._held.values() if tail == grads) for grads in (0, 1)]
        self._notes.append([time.time_ns() / 1000, *sums])


def draw_units(axes: Axes, spans: list[dict[str, Any]]) -> None:
    """Draw one row for each unit: what it does on the thread of the host, and beside it."""
    for span in spans:
        if span["kind"] == "optimizer":
            axes.axvspan(span["from"], span["to"], color="#eeeeee", zorder=0)
            middle = (span["from"] + span["to"]) / 2
            axes.text(middle, -0.62, "optimizer", ha="center", fontsize=8, color=FAINT)
            continue
        what, _, unit = span["name"].rpartition(" ")
        row = UNITS.index(unit)
        tall, below, color = LOOKS[span["kind"]]
        wide = span["to"] - span["from"]
        if what and unit == "(root)" and what == "forward":
            axes.barh(row + below, wide, tall / 3, span["from"], color=color, zorder=2)
            continue
        order = 1 if span["kind"] == "full parameters" else 3
        axes.barh(row + below, wide, tall, span["from"], color=color, zorder=order)
        if what and wide > 2.5:
            middle = (span["from"] + span["to"]) / 2
            axes.text(
                middle, row + below, what, ha="center", va="center", fontsize=7, color="white"
            ).set_zorder(4)
    axes.set_yticks(range(len(UNITS)), UNITS)
    axes.set_ylim(len(UNITS) - 0.5, -0.85)


def draw_memory(axes: Axes, notes: list[list[float]], end: float) -> None:
    times = [note[0] for note in notes] + [end]
    layers = [[note[n] / 2**20 for note in notes] for n in (1, 2)]
    layers = [values + values[-1:] for values in layers]
    axes.stackplot(times, *layers, step="post", colors=(LOOKS["full parameters"][2], GRADIENTS))
    axes.set_ylabel("MiB", color=INK)
    axes.set_xlabel("ms", color=INK)


def draw(found: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(11, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.2))
    end = max(span["to"] for span in found["spans"])
    draw_units(above, found["spans"])
    draw_memory(below, found["memory"], end)
    below.set_xlim(0, end)
    for axes in (above, below):
        axes.tick_params(colors=FAINT)
        axes.spines[["top", "right"]].set_visible(False)
    keys = [Patch(facecolor=LOOKS[kind][2], label=label) for kind, label in KEYS.items()]
    keys.append(Patch(facecolor=GRADIENTS, label="full gradients in memory"))
    figure.legend(handles=keys, loc="outside lower center", ncols=len(keys), frameon=False)
    return figure


def main() -> None:
    if sys.argv[1:] == ["--record"]:
        found = record()
        rows = {name: ",\n".join(map(json.dumps, values)) for name, values in found.items()}
        parts = [f'"{name}": [\n{lines}\n]' for name, lines in rows.items()]
        RECORD.write_text("{\n" + ",\n".join(parts) + "\n}\n")
    folder = Path(sys.argv[1]) if sys.argv[1:] not in ([], ["--record"]) else RECORD.parent
    save(draw(json.loads(RECORD.read_text())), __file__, folder)


if __name__ == "__main__":
    main()
