"""Adapters (LoRA) on a base from a folder: only what is trained travels and is saved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sparktorch.base.config import CheckpointConfig, TrainConfig
from sparktorch.base.state_dict import pack_state
from sparktorch.data.columns import KEY, LABEL, Columns, TensorSpec, input_name
from sparktorch.errors import ModuleError, PersistenceError
from sparktorch.model.trained_module import TrainedModule
from sparktorch.train.callbacks import Callback, FitContext
from sparktorch.train.recipe.dry_run import OutputSpec
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.worker import TrainJob
from tests.support.adapters import LENGTH, WORDS, Adapted, adapted, save_base
from tests.support.frames import Table
from tests.support.ranks import preload, train_job, train_on
from tests.support.resume import Counts, killed

preload("tests.support.adapters")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),  # peft reads it
    pytest.mark.landing,
]

RANKS, STEPS = 2, 4
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero3": {"strategy": "zero3", "strategy_params": {"min_parameters": 1000}},
    "localSGD": {"strategy": "localSGD", "strategy_params": {"period": 2}},
}


def sentences(rows: int = 120) -> Table:
    random = np.random.default_rng(5)
    ids = random.integers(1, WORDS, (rows, LENGTH))
    inputs = [
        TensorSpec(name=input_name(i), column=column, dtype="int64", shape=(LENGTH,))
        for i, column in enumerate(("input_ids", "attention_mask"))
    ]
    arrays = {
        "x0": ids,
        "x1": np.ones_like(ids),
        LABEL: (ids[:, 0] > WORDS // 2).astype(np.float64),
        KEY: random.integers(-(2**63), 2**63 - 1, rows, dtype=np.int64),
    }
    label = TensorSpec(name=LABEL, column="label", dtype="float64")
    return Table(arrays, Columns(inputs=tuple(inputs), label=label, classes=2))


TABLE = sentences()


def parts(ranks: int = RANKS) -> list[Any]:
    return [part.batches() for part in TABLE.parts(ranks)]


def job_for(
    module: Any, params: dict[str, Any], callback: Callback | None = None, folder: Path | None = None, **config: Any
) -> TrainJob:
    values: dict[str, Any] = {"batch_size": 30, "epochs": 3, "seed": 5, **config}
    return train_job(
        TABLE,
        Recipe(
            module=module,
            module_params=params,
            loss="CrossEntropyLoss",
            learning_rate=0.02,
            callbacks=[callback] if callback else [],
        ),
        TrainConfig(task="classification", **values),
        checkpoint=None
        if folder is None
        else CheckpointConfig(directory=f"{folder}/checkpoints", unit="step", interval=1, owner="me"),
    )


def trained_module(source: Any, params: dict[str, Any], state: dict[str, torch.Tensor]) -> TrainedModule:
    return TrainedModule(
        source=source,
        params=params,
        weights=pack_state(state),
        inputs=TABLE.columns.inputs,
        outputs=(OutputSpec("output", (2,)),),
        task="classification",
    )


def scores(module: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = module(torch.from_numpy(TABLE.arrays["x0"]), torch.from_numpy(TABLE.arrays["x1"]))
    return found


def base_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in module.named_parameters() if not p.requires_grad}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_base(tmp_path_factory.mktemp("base")))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_adapters_alone_come_back_and_score_merged_as_they_do_unmerged(strategy: str, folder: str) -> None:
    params = {"folder": folder}
    state, metas = train_on(
        parts(3 if strategy == "localSGD" else RANKS), job_for(adapted, params, **STRATEGIES[strategy])
    )
    losses = [record["loss"] for record in metas[0]["history"]]
    assert losses[-1] < 0.95 * losses[0]
    before = adapted(folder)
    whole = pack_state(before.state_dict())
    assert len(pack_state(state)) < 0.05 * len(whole)
    module: Any = trained_module(adapted, params, state).build()
    base = base_of(before)
    assert len(base) > 30
    assert all(torch.equal(base_of(module)[name], value) for name, value in base.items())
    moved = [name for name, p in module.named_parameters() if p.requires_grad]
    assert all(not torch.equal(module.get_parameter(n), before.get_parameter(n)) for n in moved if "lora_B" in n)
    unmerged = scores(module)
    assert not torch.allclose(unmerged, scores(before.eval()), atol=1e-2)
    merged = Adapted(module.model.merge_and_unload()).eval()
    torch.testing.assert_close(scores(merged), unmerged, atol=1e-6, rtol=1e-5)


def test_a_training_that_was_killed_goes_on_to_the_same_bits_from_checkpoints_of_adapters(
    folder: str, tmp_path: Path
) -> None:
    config = {**STRATEGIES["zero3"], "ema_decay": 0.9}
    expected, _ = train_on(parts(), job_for(adapted, {"folder": folder}, **config))
    kill = Counts(tmp_path, rank=1, step=STEPS + 3)
    killed(job_for(adapted, {"folder": folder}, kill, tmp_path, **config), parts())
    files = list((tmp_path / "checkpoints").rglob("*.safetensors"))
    largest = max(path.stat().st_size for path in files)
    assert 0 < largest < 0.1 * len(pack_state(adapted(folder).state_dict()))
    job = job_for(adapted, {"folder": folder}, Counts(tmp_path), tmp_path, **config)
    found, _ = train_on(parts(), job)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert int((tmp_path / "steps-0").read_text()) == 3 * STEPS


def test_a_base_that_has_changed_is_refused_by_checkpoints_and_by_models(folder: str, tmp_path: Path) -> None:
    own = save_base(tmp_path / "base")
    params = {"folder": str(own)}
    kill = Counts(tmp_path, rank=1, step=STEPS)
    state, _ = train_on(parts(1), job_for(adapted, params))
    killed(job_for(adapted, params, kill, tmp_path), parts())
    trained = trained_module(adapted, params, state)
    trained.build()
    save_base(own, seed=2)
    with pytest.raises(ModuleError, match="not those that its adapters were trained on"):
        trained.build()
    with pytest.raises(PersistenceError, match="not those that the checkpoint was trained on"):
        train_on(parts(), job_for(adapted, params, Counts(tmp_path), tmp_path))
    for file in own.iterdir():
        file.unlink()
    with pytest.raises(ModuleError, match=f"(?s)adapted cannot be built.*{own}"):
        trained.build()


def test_a_random_base_is_made_again_with_the_seed_of_its_training(folder: str) -> None:
    state, _ = train_on(parts(1), job_for(adapted, {}, seed=11))
    module = trained_module(adapted, {}, state).build()
    expected = base_of(Recipe(module=adapted).build_module(11))
    assert all(torch.equal(base_of(module)[name], value) for name, value in expected.items())
    # A training that goes on from it has the same base, whatever its own seed.
    further = job_for(adapted, {}, seed=12, epochs=1)
    recipe = Recipe(module=adapted, initial=pack_state(state), loss="CrossEntropyLoss", learning_rate=0.02)
    later, _ = train_on(parts(1), TrainJob(**{**vars(further), "recipe": recipe}))
    later_module = trained_module(adapted, {}, later).build()
    assert all(torch.equal(base_of(later_module)[name], value) for name, value in expected.items())


def test_what_an_earlier_training_has_trained_is_kept_when_a_later_one_freezes_it(folder: str) -> None:
    params = {"folder": folder}
    first, _ = train_on(parts(1), job_for(adapted, params, epochs=1))
    second = job_for(adapted, params, epochs=1)
    frozen = {"initial": pack_state(first), "freeze": ["*lora_A*", "*layer.0.*"]}
    later, _ = train_on(parts(), TrainJob(**{**vars(second), "recipe": replace(second.recipe, **frozen)}))
    assert later.keys() == first.keys()
    kept = {name for name in first if "lora_A" in name or "layer.0." in name}
    assert len(kept) == 6
    trained = {name for name, value in later.items() if not torch.equal(value, first[name])}
    assert trained == first.keys() - kept - {"sparktorch.base"}
    built = trained_module(adapted, params, later).build().state_dict()
    assert all(torch.equal(built[name], value) for name, value in later.items() if name != "sparktorch.base")


def test_the_best_weights_of_an_instance_and_its_saved_model_have_the_base(folder: str, tmp_path: Path) -> None:
    instance = adapted(folder)
    state, _ = train_on(parts(1), job_for(instance, {}))
    assert len(pack_state(state)) < 0.05 * len(pack_state(instance.state_dict()))
    trained = trained_module(instance, {}, state)
    trained.save(tmp_path)  # an instance has no import path: its graph is exported
    loaded = TrainedModule.load(tmp_path)
    torch.testing.assert_close(scores(loaded.build()), scores(trained.build()), atol=1e-5, rtol=1e-5)


class Thaws(Callback):
    ranks = "all"

    def on_step_end(self, context: FitContext) -> None:
        with torch.no_grad():
            next(p for p in context.module.parameters() if not p.requires_grad).add_(1)


def test_a_base_that_a_callback_changes_is_an_error_and_not_a_wrong_result(folder: str) -> None:
    with pytest.raises(ModuleError, match="frozen under the adapters when the training began have changed"):
        train_on(parts(1), job_for(adapted, {"folder": folder}, Thaws()))
