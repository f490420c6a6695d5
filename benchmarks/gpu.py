"""Samples a second of whole fits on 1, 2, 4 .. N devices of this machine, and what they are of what there could be.

A ResNet-50 over images of 224 x 224 and a BERT-base over 128 tokens, written in `benchmarks.gpu_by_hand`, learn to tell
classes apart in synthetic rows: a Parquet file of random bytes or token ids for each rank, which Spark reads. A rank is
a barrier task of `local[N]` with a device, and with one torch thread; it computes in bfloat16 under autocast. Weak
scaling: each rank has its own 12 steps of 256 rows, or of a half, a quarter and so on of them, where the memory of the
device calls for it. A fit is of four epochs. The first one warms up. The others are measured, each from end to end, the
sums over the ranks included.

- Share of peak: floating-point operations of the model, forward and backward, which torch's `FlopCounterMode` counts
  once without computing anything, times samples a second, over what the device's data sheet promises for dense matrices
  in this precision. Of devices that are not in `PEAKS` none is shown.
- Waited for data: the share of the time that the loop waited for its next batch, as `data_wait_share` has it: once with
  the rows where `storage="memory"` puts them, once with rows on disk, which are copied to the device step by step. The
  host is who waits; what that costs is in the samples a second of the one over those of the other.
- Efficiency: samples a second and rank on N devices over those on one; beside it, what others have published.
- Saved by overlap: the share of a step that is gone because gradients are sent while backward goes on. Without overlap
  all gradients are in one bucket.
- Beside `torchrun`: a hand-written script with the same module, batch, optimizer and precision reads the same files on
  the same devices. Wall seconds from begin to end, and seconds of a step of the loop. A fit finds the Python workers of
  the fits before it; `torchrun` starts its own.

`--device cpu` trains small networks on two ranks, to test this script; its figures mean nothing. For `--precision` take
"fp16" on devices without bfloat16, such as V100 and T4. The files, and Spark's shuffle of them, take 1 GB a rank in the
directory for temporary files (`TMPDIR`).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pyspark.sql import SparkSession
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import gpu_by_hand
from benchmarks.common import Goal, arguments, interleave, machine, report, run_process, seconds, session, workspace
from benchmarks.gpu_by_hand import NETS, Task
from sparktorch import TorchClassificationModel, TorchClassifier

GB = 10**9
GB_A_ROW = 0.1  # A step takes less than this for a row, and than twice as much in float32.
ONE_BUCKET_MB = 100_000  # This is larger than any model here.
ROW_GROUP = 128  # Spark reads so many rows of a file at a time.
EFFICIENCY, LOOP = Goal(0.9, at_least=True), Goal(1.05)


@dataclass(frozen=True)
class Peak:
    """Operations a second that a data sheet promises for dense matrices, in 10^12, by precision."""

    bf16: float | None
    fp16: float | None
    fp32: float


# By words of the device's name: the first entry whose words are all there. Where a data sheet has figures for sparse
# matrices, these are half of them; float32 is that without TF32. The data sheets are those of
# https://www.nvidia.com/en-us/data-center/, pages h100, h200, a100, v100, l4 and tesla-t4.
PEAKS: dict[tuple[str, ...], Peak] = {
    ("H200", "NVL"): Peak(835.5, 835.5, 60),
    ("H200",): Peak(989.5, 989.5, 67),
    ("H100", "NVL"): Peak(835.5, 835.5, 60),
    ("H100", "PCIe"): Peak(756, 756, 51),
    ("H100", "HBM3"): Peak(989.5, 989.5, 67),
    ("A100",): Peak(312, 312, 19.5),
    ("V100S",): Peak(None, 130, 16.4),
    ("V100", "PCIE"): Peak(None, 112, 14),
    ("V100",): Peak(None, 125, 15.7),
    ("L4",): Peak(121, 121, 30.3),
    ("T4",): Peak(None, 65, 8.1),
}

# What others have published, by where it stands. Figures 7 to 9 of Li et al. are curves: over the size of buckets, and
# up to 256 GPUs.
PUBLISHED = {
    "Goyal et al. 2017, https://arxiv.org/abs/1706.02677, abstract": {
        "ResNet-50: efficiency on 256 GPUs, over that on 8": 0.9,
    },
    "Li et al. 2020, https://arxiv.org/abs/2006.15704, figure 6": {
        "ResNet-50: saved by overlap on 32 GPUs, NCCL": 0.38,
        "BERT: saved by overlap on 32 GPUs, NCCL": 0.352,
    },
}

# Prints name and memory of each device; in a process of its own, so that this one has no context on any.
LOOK = """
import json, sys, torch
module = torch.get_device_module(sys.argv[1])
found = [module.get_device_properties(index) for index in range(module.device_count())]
print(json.dumps([[each.name, each.total_memory] for each in found]))
"""


@dataclass(frozen=True)
class Case:
    """What is trained.

    Attributes:
        net: A name in `NETS`.
        params: Keyword arguments of the network.
        shape: Of a row's features: that of an image, or the number of tokens.
        values: How many values a byte or a token may have.
        classes: Number of labels.
        optimizer: A class in `torch.optim`.
        optimizer_params: Its keyword arguments.
        batch: Rows of a rank in a step.
        steps: Steps of an epoch.
    """

    net: str
    params: dict[str, Any]
    shape: tuple[int, ...]
    values: int
    classes: int
    optimizer: str
    optimizer_params: dict[str, float]
    batch: int = 256
    steps: int = 12

    @property
    def images(self) -> bool:
        """Whether a row is an image."""
        return len(self.shape) == 3

    def flops_of_a_row(self) -> float:
        """Returns the floating-point operations of forward and backward; an addition and a multiplication are two."""
        with torch.device("meta"):  # This device has shapes without numbers.
            module = NETS[self.net](**self.params)
            rows = torch.zeros((2, *self.shape), dtype=torch.uint8 if self.images else torch.int64)
            # The counter counts this kernel of attention on every device.
            with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
                module(rows).sum().backward()
        return float(counter.get_total_flops() / 2)


SGD, ADAM = {"lr": 0.01, "momentum": 0.9}, {"lr": 1e-4}
CASES = {
    "ResNet-50": Case("ResNet", {}, (3, 224, 224), 256, 1000, "SGD", SGD),
    "BERT-base": Case("Bert", {}, (128,), 30_522, 2, "AdamW", ADAM),
}
SMALL = {
    "small ResNet": Case(
        "ResNet", {"blocks": [1, 1, 1, 1], "width": 8, "classes": 10}, (3, 32, 32), 256, 10, "SGD", SGD, 16, 4
    ),
    "small BERT": Case(
        "Bert", {"layers": 2, "width": 32, "heads": 2, "vocabulary": 100}, (16,), 100, 2, "AdamW", ADAM, 16, 4
    ),
}


@dataclass(frozen=True)
class Way:
    """How a case is trained: on how many ranks, rows where, and whether with all gradients in one bucket."""

    ranks: int
    storage: str = "memory"
    overlap: bool = True

    def __str__(self) -> str:
        how = "" if self.storage == "memory" else f", rows on {self.storage}"
        return f"{self.ranks} rank{'s' * (self.ranks > 1)}{how}{'' if self.overlap else ', no overlap'}"


@dataclass(frozen=True)
class Devices:
    """What there is to train on: the type, and of each device its name and its memory in bytes."""

    kind: str
    names: list[str]
    memory: int

    @classmethod
    def look(cls, kind: str) -> Devices:
        """Looks for devices of a type.

        Raises:
            SystemExit: There is none.
        """
        if kind == "cpu":
            return cls(kind, ["cpu"] * min(2, len(os.sched_getaffinity(0))), 0)
        _, printed = run_process([sys.executable, "-c", LOOK, kind])
        devices = json.loads(printed.splitlines()[-1])
        if not devices:
            raise SystemExit(
                f"torch {torch.__version__} sees no {kind} device here: is there one, with its driver, and is this a "
                "build of torch for it? --device cpu tries the script without one"
            )
        return cls(kind, [name for name, _ in devices], min(memory for _, memory in devices))

    def peak(self, precision: str) -> float | None:
        """Returns the operations a second of one of them; `None` if they differ, or are not known."""
        words = set(re.split(r"[\s-]+", self.names[0]))
        if len(set(self.names)) > 1 or "MIG" in words:
            return None
        for name, peak in PEAKS.items():
            if words.issuperset(name):
                of_precision: float | None = getattr(peak, precision)
                return None if of_precision is None else of_precision * 1e12
        return None

    def fitting(self, case: Case, precision: str) -> Case:
        """Returns the case with so many rows in a step that their activations fit into the memory."""
        size = GB_A_ROW * GB * (2 if precision == "fp32" else 1)
        batch = case.batch
        while self.memory and batch > 1 and batch * size > 0.7 * self.memory:
            batch //= 2
        return replace(case, batch=batch)


def write_rows(case: Case, directory: Path, files: int) -> list[str]:
    """Writes files with the rows of one rank each; returns their paths."""
    directory.mkdir()
    paths = [str(directory / f"part-{number:03d}.parquet") for number in range(files)]
    for number, path in enumerate(paths):
        random = np.random.default_rng(number)
        first = number * case.steps * case.batch
        tables = [rows_of_a_step(case, random, first + step * case.batch) for step in range(case.steps)]
        with pq.ParquetWriter(path, tables[0].schema, compression="none", use_dictionary=False) as writer:
            for table in tables:
                writer.write_table(table, row_group_size=ROW_GROUP)
    return paths


def rows_of_a_step(case: Case, random: np.random.Generator, first: int) -> pa.Table:
    """Returns random rows, as many as a rank has in a step, whose numbers begin with `first`."""
    width = int(np.prod(case.shape))
    offsets = pa.array(np.arange(case.batch + 1, dtype=np.int32) * width)
    if case.images:
        data = pa.py_buffer(random.bytes(case.batch * width))
        features = pa.Array.from_buffers(pa.binary(), case.batch, [None, offsets.buffers()[1], data])
    else:
        tokens = random.integers(0, case.values, case.batch * width, np.int32)
        features = pa.ListArray.from_arrays(offsets, pa.array(tokens))
    ids = np.arange(first, first + case.batch)
    return pa.table({"id": ids, "features": features, "label": random.integers(0, case.classes, case.batch)})


class Turns:
    """The turns of all cases and ways: each trains, gives its samples a second, and notes the rest."""

    def __init__(
        self,
        spark: SparkSession,
        cases: Mapping[str, Case],
        files: Mapping[str, list[str]],
        *,
        device: str,
        precision: str,
        epochs: int,
    ) -> None:
        self.noted: dict[str, list[float]] = {}
        self.storage: dict[str, str] = {}
        self._spark, self._cases, self._files = spark, cases, files
        self._device, self._precision, self._epochs = device, precision, epochs

    def fits(self, ways: Iterable[Way]) -> dict[str, Callable[[], float]]:
        """Returns fits of all cases by name."""
        return {f"{name}: {way}, samples/s": partial(self._fit, name, way) for name, way in product(self._cases, ways)}

    def by_hand(self, ranks: int) -> dict[str, Callable[[], float]]:
        """Returns runs of the hand-written script, of all cases, by name."""
        return {f"{name}: torchrun, samples/s": partial(self._torchrun, name, ranks) for name in self._cases}

    def forget(self) -> None:
        """Forgets what was noted while warming up."""
        self.noted.clear()

    def check(self) -> None:
        """Compares what both sides have learned.

        Raises:
            RuntimeError: One has learned something else.
        """
        for name in self._cases:
            losses = [statistics.median(self.noted[f"{name}: {side}"]) for side in ("loss", "loss by hand")]
            if not max(losses) < 1.5 * min(losses):
                raise RuntimeError(f"{name}: the sides do not train alike: {losses}")

    def _fit(self, name: str, way: Way) -> float:
        case = self._cases[name]
        learner = estimator(case, way, device=self._device, precision=self._precision, epochs=self._epochs)
        models: list[TorchClassificationModel] = []
        wall = seconds(lambda: models.append(learner.fit(self._spark.read.parquet(*self._files[name][: way.ranks]))))
        summary = models[0].summary
        measured = summary.history[1:]
        took = sum(record["seconds"] for record in measured)
        waited = sum(record["data_wait_share"] * record["seconds"] for record in measured) / took
        self._note(f"{name}: {way}, waited for data", waited)
        self._note(f"{name}: {way}, fit, s", wall)
        self._note(f"{name}: loss", summary.history[-1]["loss"])
        most = max(rank.get("peak_device_memory", 0) for rank in summary.ranks)
        if most:
            self._note(f"{name}: {way}, most of a device's memory, GB", most / GB)
        self.storage[f"{name}: {way}"] = ", ".join(sorted({rank["storage"] for rank in summary.ranks}))
        return float(summary.rows * len(measured) / took)

    def _torchrun(self, name: str, ranks: int) -> float:
        case = self._cases[name]
        task = Task(
            net=case.net,
            params=case.params,
            files=self._files[name][:ranks],
            shape=list(case.shape),
            batch=case.batch,
            epochs=self._epochs,
            optimizer=case.optimizer,
            optimizer_params=case.optimizer_params,
            channels_last=case.images,
            device=self._device,
            precision=self._precision,
        )
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        wall, out = run_process([*launch, gpu_by_hand.__file__, json.dumps(asdict(task))])
        result = json.loads(out.splitlines()[-1])
        self._note(f"{name}: torchrun, s", wall)
        self._note(f"{name}: loss by hand", result["loss"])
        return float(case.batch * ranks / result["step"])

    def _note(self, name: str, value: float) -> None:
        self.noted.setdefault(name, []).append(value)


def estimator(case: Case, way: Way, *, device: str, precision: str, epochs: int) -> TorchClassifier:
    """Returns the estimator with the settings of the hand-written script."""
    options = dict(case.optimizer_params)
    inputs: dict[str, Any] = {}
    if case.images:
        inputs = {
            "inputLayouts": {"features": "raw"},
            "inputDtypes": {"features": "uint8"},
            "inputShapes": {"features": list(case.shape)},
        }
    return TorchClassifier(
        module=NETS[case.net],
        moduleParams=case.params,
        optimizer=case.optimizer,
        learningRate=options.pop("lr"),
        optimizerParams=options,
        batchSize=case.batch * way.ranks,
        epochs=epochs,
        numWorkers=way.ranks,
        device=device,
        precision=precision,
        channelsLast=case.images,
        storage=way.storage,
        strategyParams={} if way.overlap else {"bucket_cap_mb": ONE_BUCKET_MB},
        idCol="id",
        progress=False,
        **inputs,
    )


def sizes(most: int) -> list[int]:
    """Returns 1, 2, 4 and so on, and `most`."""
    return [*(2**power for power in range(most.bit_length()) if 2**power < most), most]


def compared(
    median: Mapping[str, float], flops: Mapping[str, float], most: int, peak: float | None
) -> dict[str, float]:
    """Returns the ratios.

    Args:
        median: Of all that was measured, by name.
        flops: Operations of a row, by case.
        most: The most ranks.
        peak: Operations a second of a device, if that is known.
    """
    ratios = {}
    for name in flops:
        rates = {size: median[f"{name}: {Way(size)}, samples/s"] for size in sizes(most)}
        for size, rate in rates.items():
            if size > 1:
                ratios[f"{name}: efficiency on {size} ranks"] = rate / size / rates[1]
            if peak is not None:
                ratios[f"{name}: share of peak on {Way(size)}"] = flops[name] * rate / size / peak
        for way in (Way(most), Way(most, "disk")):
            ratios[f"{name}: waited for data on {way}"] = median[f"{name}: {way}, waited for data"]
        ratios[f"{name}: rows on disk / in memory, {Way(most)}"] = (
            median[f"{name}: {Way(most, 'disk')}, samples/s"] / rates[most]
        )
        if most > 1:
            alone = median[f"{name}: {Way(most, overlap=False)}, samples/s"]
            ratios[f"{name}: saved by overlap on {most} ranks"] = 1 - alone / rates[most]
        ratios[f"{name}: fit / torchrun"] = median[f"{name}: {Way(most)}, fit, s"] / median[f"{name}: torchrun, s"]
        ratios[f"{name}: loop per step / by hand"] = median[f"{name}: torchrun, samples/s"] / rates[most]
    return ratios


def goals_of(ratios: Iterable[str]) -> dict[str, Goal]:
    """Returns the goals of those ratios that have one, on accelerators."""
    goals = {}
    for name in ratios:
        if ": efficiency on " in name:
            goals[name] = EFFICIENCY
        elif name.endswith("loop per step / by hand"):
            goals[name] = LOOP
    return goals


def show_published() -> None:
    """Prints what others have published."""
    for where, figures in PUBLISHED.items():
        print(f"\n{where}")
        for what, figure in figures.items():
            print(f"  {what:66}{figure:10.3f}")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds what only this benchmark takes."""
    parser.add_argument("--device", default="cuda", metavar="TYPE", help='a type of accelerator ("cuda"), or "cpu"')
    parser.add_argument("--ranks", type=int, metavar="N", help="devices to scale to (all)")
    parser.add_argument("--precision", choices=("bf16", "fp16", "fp32"), help="bf16, and fp32 on CPUs")
    parser.add_argument("--rounds", type=int, metavar="N", help="how often each side is measured (5, with --quick 1)")
    parser.add_argument("--batch", type=int, metavar="ROWS", help="rows of a rank in a step (256, if they fit)")


def main() -> None:
    """Measures, prints and writes the result."""
    options = arguments(__doc__ or "", add_options)
    devices = Devices.look(options.device)
    small = options.device == "cpu"
    precision = options.precision or ("fp32" if small else "bf16")
    most = options.ranks or len(devices.names)
    if not 1 <= most <= len(devices.names):
        raise SystemExit(f"--ranks must be between 1 and the number of devices, {len(devices.names)}")
    cases = {name: devices.fitting(case, precision) for name, case in (SMALL if small else CASES).items()}
    if options.batch:
        cases = {name: replace(case, batch=options.batch) for name, case in cases.items()}
    flops = {name: case.flops_of_a_row() for name, case in cases.items()}
    ways = [*map(Way, sizes(most)), Way(most, "disk"), *([Way(most, overlap=False)] if most > 1 else [])]
    with workspace() as work, session(work, cores=most, spark__driver__memory=f"{4 + 2 * most}g") as spark:
        files = {name: write_rows(case, work / name, most) for name, case in cases.items()}
        epochs = 2 if options.quick else 4
        turns = Turns(spark, cases, files, device=options.device, precision=precision, epochs=epochs)
        interleave(turns.fits([Way(most)]), 1)  # These turns warm up.
        turns.forget()
        rounds = options.rounds or (1 if options.quick else 5)
        samples = interleave(turns.fits(ways) | turns.by_hand(most), rounds)
    turns.check()
    samples |= turns.noted
    median = {name: statistics.median(values) for name, values in samples.items()}
    ratios = compared(median, flops, most, devices.peak(precision))
    show_published()
    report(
        "gpu",
        samples=samples,
        ratios=ratios,
        goals={} if small else goals_of(ratios),
        facts={
            "device": options.device,
            "devices": devices.names,
            "precision": precision,
            "batch": {name: case.batch for name, case in cases.items()},
            "gflop_of_a_row": {name: round(count / GB, 3) for name, count in flops.items()},
            "rows_in": turns.storage,
            "published": PUBLISHED,
            **machine("torch", "pyspark", "pyarrow", "numpy"),
        },
        path=options.json,
    )


if __name__ == "__main__":
    main()
