"""A process killed at any moment of a checkpoint's writing: the one before loads, bit for bit."""

from __future__ import annotations

import multiprocessing
import random
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from sparktorch.train.checkpoint.store import CheckpointStore, Manifest, read_tensors, snapshot

ROUNDS = 20
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.support.warm"])


def tensor(step: int) -> torch.Tensor:
    return torch.rand(300_000, generator=torch.Generator().manual_seed(step))


def save(folder: str, first: int, done: Connection) -> None:
    torch.set_num_threads(1)
    store = CheckpointStore(folder, "a1")
    for step in range(first, first + 10_000):
        share = snapshot({"module.x": tensor(step)}, {"step": step}, lambda _: True)
        files = store.write_share(step, 0, share)
        store.write_manifest(Manifest(step=step, epoch=0, step_in_epoch=step, world_size=1, job={}, files=files))
        store.keep({step - 1, step}, before=step)
        done.send(step)


def test_killed_at_twenty_random_moments_the_one_before_always_loads(tmp_path: Path) -> None:
    draw = random.Random(5)
    store = CheckpointStore(str(tmp_path))
    unfinished = step = 0
    for _ in range(ROUNDS):
        ours, theirs = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(target=save, args=(str(tmp_path), step + 1, theirs))
        process.start()
        theirs.close()
        step = ours.recv()
        took = time.monotonic()
        step = ours.recv()
        took = time.monotonic() - took
        time.sleep(draw.uniform(0, 2 * took))
        process.kill()
        process.join()
        with suppress(EOFError):
            while ours.poll():
                step = ours.recv()
        ours.close()

        manifest, problems = store.usable()
        assert manifest is not None
        assert manifest.step in (step, step + 1), "the last that was told of, or the one that was being written"
        assert all("was never finished" in str(problem) for problem in problems)
        with store.local(manifest, lambda *_: True) as folder:
            assert store.read_rest(manifest, 0) == {"step": manifest.step}
            assert torch.equal(read_tensors(folder, 0, "module.")["x"], tensor(manifest.step))
        unfinished += len(problems)
        step = manifest.step
    assert unfinished >= ROUNDS // 4, "most moments were to be in the middle of the writing"
