"""Trains with checkpoints on a mount as those of object stores are, is killed, goes on, and writes a model there.

Runs in a mount namespace of its own; prints what became of it as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from sparktorch.base.world import World
from sparktorch.train.checkpoint.store import CheckpointStore
from sparktorch.train.loop.model_folder import ModelFolder
from tests.support.bucket_mount import mounted
from tests.support.disks import digest
from tests.support.ranks import train_on
from tests.support.resume import STEPS, Counts, job_for, killed, parts


def main(folder: Path) -> None:
    with mounted(folder) as mount:
        killed(job_for(mount, Counts(folder / "seen", rank=1, step=STEPS + 2)), 2)
        state, _ = train_on(parts(2), job_for(mount, Counts(folder / "seen", rank=1, step=STEPS + 2)))
        usable, problems = CheckpointStore(f"{mount}/checkpoints").usable()
        models = []
        for weights in (state, {}):  # the second attempt finds what the first one has written
            written = ModelFolder(str(mount / "models" / "fit-1"), World())
            written.check()
            model = written.write(weights)
            models.append(digest({name: model[name] for name in model}))
        left = sorted(path.name for path in (mount / "models").iterdir())
    result = {
        "weights": digest(state),
        "usable": usable.step if usable else None,
        "problems": [str(problem) for problem in problems],
        "models": models,
        "left": left,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
