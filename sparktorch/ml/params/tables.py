"""The Params of estimators for modules of any kind, in one table per subject; a task has its Params in its folder.

Accessors, constructors, `help`, stubs and docs/params.md come from them.

To add a Param, add an entry, run `python scripts/params.py`, and use the value in the code; a new table goes into the
classes that have it, in `classes`. `field` names the configuration field that gets the value: "config" is
`TrainConfig`, "recipe" is `Recipe`, and so on (`ml/fit/translate.py`).
"""

from __future__ import annotations

from pyspark.ml.param.shared import (
    HasFeaturesCol,
    HasInputCols,
    HasLabelCol,
    HasOutputCols,
    HasPredictionCol,
    HasProbabilityCol,
    HasRawPredictionCol,
    HasSeed,
    HasThresholds,
    HasValidationIndicatorCol,
    HasWeightCol,
)

from sparktorch.ml.params.declare import ParamSpec as P

# fmt: off
MODULE = (
    P("module", "Any", None,
      "the nn.Module class or factory, its import path 'package.module:Name', an instance, a fitted model to "
      "go on from, or a model of Hugging Face's as a local folder or a configuration", compared=True),
    P("moduleParams", "dict[str, Any]", {},
      "keyword arguments of the module's class or factory; for a folder of Hugging Face's, entries that replace those "
      "of its configuration", compared=True),
)

COLUMNS = (
    P("featuresCol", "str", "features", "the input column", compared=False, shared=HasFeaturesCol, columns="inputs"),
    P("inputCols", "list[str]", None,
      "the input columns, in the order of the arguments of forward, in place of featuresCol",
      compared=False, shared=HasInputCols, columns="inputs"),
)

INPUTS = (
    P("assembleInputs", "bool", False,
      "whether all the scalar columns of inputCols become one tensor of shape (rows, columns), which forward gets in "
      "place of the first of them", compared=True),
    P("inputShapes", "dict[str, list[int]]", {},
      "the shape of one row by input column, such as {'image': [28, 28, 1]}; by default that of the first row",
      compared=True),
    P("inputLayouts", "dict[str, str]", {},
      "what forward gets, by input column: 'dense' (the default), 'padded' or 'jagged' for arrays of unequal "
      "length, 'sparse_csr' for ML vectors, 'raw' for bytes of a tensor, 'image' for JPEG and PNG files",
      compared=True),
    P("inputDtypes", "dict[str, str]", {},
      "the tensor's dtype by input column; by default int64 for whole numbers and float32 for all others",
      compared=True),
    P("maxLengths", "dict[str, int]", {},
      "the number of elements after which rows are cut off, by padded or jagged input column (> 0)", compared=True),
    P("padValues", "dict[str, float]", {},
      "what rows are padded with, by padded input column; 0 by default", compared=True),
    P("preprocess", "str | Callable[..., Any]", None,
      "a callable (columns, *, epoch, generator), or its import path, which gets a dict of the input columns and "
      "returns a dict of the arguments of forward, in training and in scoring", compared=True),
    P("nullPolicy", "str", "error",
      "what fit does with rows that hold a null or NaN: 'error', 'drop' the row, or 'fill' the gap with fillValue",
      compared=True),
    P("fillValue", "float", 0.0,
      "the number that replaces nulls and NaN in the inputs with nullPolicy 'fill', in scoring too", compared=True),
)

LABEL = (
    P("labelCol", "str", "label", "the label column; an empty name says that the loss takes no labels",
      compared=False, shared=HasLabelCol, columns="fit"),
)

LABELS = (
    P("labelCols", "list[str]", None,
      "scalar columns that become one label, (rows, columns), in place of labelCol", compared=True, columns="fit"),
)

PREDICTION = (
    P("predictionCol", "str", "prediction",
      "the output column; an empty name leaves it out", compared=False, shared=HasPredictionCol),
    P("outputLayers", "dict[str, str]", {},
      "further output columns, array<float>, of what layers of the module return: the name of a layer by column, such "
      "as {'embedding': 'layers.1'}", compared=False),
)

CLASSIFIED = (
    P("probabilityCol", "str", "probability",
      "the output column of probabilities; an empty name leaves it out", compared=False, shared=HasProbabilityCol),
    P("rawPredictionCol", "str", "rawPrediction", "the output column of scores (logits); an empty name leaves it out",
      compared=False, shared=HasRawPredictionCol),
    P("thresholds", "list[float]", None,
      "one threshold per class: the class with the largest probability / threshold is predicted",
      compared=False, shared=HasThresholds),
)

OUTPUTS = (
    P("outputCols", "list[str]", None,
      "the output columns of a module that returns several tensors", compared=False, shared=HasOutputCols),
)

WEIGHT = (
    P("weightCol", "str", None,
      "a column of sample weights (>= 0); without it, all rows weigh the same", compared=False, shared=HasWeightCol,
      columns="fit"),
)

ROWS = (
    P("validationIndicatorCol", "str", None, "a boolean column, true for the rows that validate and do not train",
      compared=False, shared=HasValidationIndicatorCol, columns="fit"),
    P("idCol", "str", None,
      "a column that identifies a row, used in place of its contents to order the training", compared=False,
      columns="fit"),
)

GROUPS = (
    P("groupCol", "str", None,
      "a column that groups rows: those of a group stay together, and batches have whole groups; batchSize then counts "
      "groups, and the loss is a callable (output, label, sizes) -> loss per group", compared="unless default",
      columns="fit"),
    P("orderCol", "str", None, "a column that orders the rows of a group: whole numbers, dates or timestamps",
      compared="unless default", columns="fit"),
)

LOSS = (
    P("loss", "str | Callable[..., Any]", None,
      "a class in torch.nn by name, an import path, or a callable (output, label) -> loss per row; where it is not "
      "set, a model of Hugging Face's computes its own", compared=True, brought="training_step returns it"),
    P("lossParams", "dict[str, Any]", {},
      "keyword arguments of the loss class", field="recipe.loss_params", compared=True,
      brought="training_step computes the loss"),
)

CLASS_WEIGHTS = (
    P("classWeights", "str | list[float]", None,
      "one weight per class, by which the weights of its rows are multiplied, or 'balanced' for rows / (classes * "
      "rows of the class)", compared=True),
)

OPTIMIZER = (
    P("trainingStep", "str | Callable[..., Any]", None,
      "a callable (module, batch) -> loss, or (loss, metrics), or its import path, in place of loss",
      field="recipe.training_step", compared=True, brought="the module has its own training_step"),
    P("optimizer", "str | Callable[..., Any]", "AdamW",
      "a class in torch.optim by name, an import path, or a factory (parameters, lr, **params)",
      field="recipe.optimizer", compared=True, brought="configure_optimizers returns it"),
    P("optimizerParams", "dict[str, Any]", {},
      "keyword arguments of the optimizer besides the learning rate", field="recipe.optimizer_params", compared=True,
      brought="configure_optimizers returns the optimizer"),
    P("learningRate", "float", 0.001, "learning rate (> 0)", field="recipe.learning_rate", compared=True,
      brought="configure_optimizers sets it"),
    P("parameterGroups", "list[dict[str, Any]]", [],
      "dicts with 'params', glob patterns of the names of parameters, and the optimizer settings of these that "
      "differ, such as lr or weight_decay; the first dict that matches a name holds",
      field="recipe.parameter_groups", compared=True, brought="configure_optimizers makes the groups"),
    P("freeze", "list[str]", [],
      "glob patterns of the names of parameters that are not trained; '!pattern' excepts those that it matches",
      field="recipe.freeze", compared=True),
    P("scheduler", "str | Callable[..., Any]", None,
      "a class in torch.optim.lr_scheduler by name, an import path, or a factory (optimizer, **params)",
      field="recipe.scheduler", compared=True, brought="configure_optimizers returns it"),
    P("schedulerParams", "dict[str, Any]", {},
      "keyword arguments of the scheduler; T_max and total_steps need not be among them",
      field="recipe.scheduler_params", compared=True, brought="configure_optimizers returns the scheduler"),
    P("schedulerInterval", "str", "epoch", "whether the scheduler steps after each 'step' or each 'epoch'",
      field="config.schedule_interval", compared=True,
      brought="it is the 'interval' that configure_optimizers returns"),
    P("warmupSteps", "int", None, "steps over which the learning rate rises linearly to what the scheduler says (>= 0)",
      field="config.warmup_steps", compared=True, brought="return a scheduler with a warm-up, such as SequentialLR"),
    P("referenceBatchSize", "int", None,
      "the batch size for which learningRate was chosen: the rate is scaled to batchSize, with a warm-up (> 0)",
      field="config.reference_batch_size", compared=True, brought="scale the learning rate in configure_optimizers"),
)

STEPS = (
    P("batchSize", "int", 256,
      "rows of one optimizer step over all workers together (> 0)", field="config.batch_size", compared=True),
    P("accumulationSteps", "int", 1,
      "the parts into which a worker splits its rows of a step; their gradients are added up (> 0)",
      field="config.accumulation_steps", compared=False),
    P("microBatchSize", "int | str", None,
      "the most rows a worker takes through the module at a time, in place of accumulationSteps (> 0); 'auto' finds "
      "how many the devices of all workers have memory for",
      field="config.micro_batch_size", compared=False),
    P("gradientClipNorm", "float", None, "largest norm of the whole gradient; a larger one is scaled down (> 0)",
      field="config.clip_norm", compared=True),
    P("gradientClipValue", "float", None,
      "largest absolute value of an element of the gradient; a larger one is cut off (> 0)",
      field="config.clip_value", compared=True),
)

NUMERICS = (
    P("precision", "str", "fp32",
      "'fp32', 'tf32' to let GPUs multiply float32 matrices with shorter mantissas, or 'bf16' or 'fp16' to "
      "train under autocast; the weights stay fp32", field="config.precision", compared=True),
    P("compile", "bool", False, "whether to train through torch.compile; workers need a C++ compiler for it on CPUs",
      field="config.compile", compared=False),
    P("channelsLast", "bool", False,
      "whether images, inputs of four axes, and the module's weights are laid out with the channels last",
      field="config.channels_last", compared=False),
    P("syncBatchNorm", "bool", False, "whether batch normalisation takes its statistics over the rows of all workers",
      field="config.sync_batch_norm", compared=True),
    P("emaDecay", "float", None,
      "decay of an exponential moving average of the weights, which validation and the model then use (< 1; 0 for "
      "none)", field="config.ema_decay", compared=True),
    P("nonFiniteLoss", "str", "error", "what happens at a loss that is NaN or infinite: 'error', or 'skip' the step",
      field="config.non_finite", compared=True),
    P("deterministic", "bool", False,
      "whether two runs on the same machines give the same bits; operations that cannot do so are errors",
      field="config.deterministic", compared=False),
)

EPOCHS = (
    P("epochs", "int", 1, "passes over the training rows (> 0)", field="config.epochs", compared=True),
    P("validationInterval", "int", 1,
      "the epochs or steps from one validation to the next; the last one of the training is always validated (> 0)",
      field="config.validation_interval", compared=True),
    P("validationUnit", "str", "epoch",
      "what validationInterval counts: 'epoch' or 'step'", field="config.validation_unit", compared=True),
    P("metrics", "dict[str, Any]", {},
      "further validation metrics by name: the name of a class in torchmetrics, {'name': ..., and its "
      "parameters}, a factory or an instance", field="recipe.metrics", compared=False),
    P("validationBatchSize", "int", None,
      "validation rows that a worker takes through the module at a time; without it, as many as training takes, "
      "and 4096 at most (> 0)", field="config.validation_batch_size", compared=False),
    P("earlyStoppingPatience", "int", None,
      "the number of validations in a row without a better one, after which training ends; the model has the weights "
      "of the best (> 0)", field="config.patience", compared=True),
    P("earlyStoppingMetric", "str", "val_loss", "the metric that says which of two validations is better",
      field="config.best_metric", compared="unless default"),
    P("earlyStoppingMode", "str", "auto",
      "whether the best value of earlyStoppingMetric is the smallest, 'min', or the largest, 'max'; 'auto' goes by "
      "its name, such as val_mae or val_f1, and refuses a name that does not say",
      field="config.best_mode", compared="unless default"),
    P("earlyStoppingMinDelta", "float", 0.0, "the difference that a validation must exceed to be better (>= 0)",
      field="config.best_delta", compared="unless default"),
    P("maxMinutes", "float", None,
      "the minutes of training after which it ends, with the next validation or, without validation rows, the next "
      "epoch; those before a restart or a checkpoint do not count (> 0)", field="config.max_minutes", compared=False),
    P("callbacks", "list[Any]", [], "Callback instances, whose hooks run in the workers and on the driver",
      field="recipe.callbacks", compared=False),
)

STORAGE = (
    P("split", "str", "key",
      "'key' sends each row to a worker by its contents, and the training depends on nothing else; 'keep' gives each "
      "partition as it is to one worker, without a shuffle", field="request.split", compared=True),
    P("storage", "str", "memory",
      "where a worker keeps its rows: in 'memory', on 'disk' in Spark's local directories, or 'auto': in memory "
      "as far as memoryBudget goes, and else on disk", field="storage.kind", compared=False),
    P("memoryBudget", "int", 1024,
      "MB of memory that the rows of one worker may take, with storage 'disk' or 'auto' (> 0)",
      field="storage.budget", compared=False),
)

SAMPLING = (
    P("shuffle", "bool", True, "whether every epoch draws its batches anew", field="config.shuffle", compared=True),
    P("shuffleBlock", "int", None,
      "the number of neighbours (by key) that are shuffled as one block, which is one disk read; an epoch trains the "
      "rows of a block within as many steps; 1 shuffles single rows; the default is 1 with storage 'memory', and else "
      "32 (> 0)", compared=True),
    P("seed", "int", 0, "seed of the initial weights, the sampling and each worker's generators",
      field="config.seed", compared=True, shared=HasSeed),
)

STRATEGY = (
    P("strategy", "str", "ddp",
      "how the workers share the work: 'ddp'; 'zero1', 'zero2' and 'zero3', which divide optimizer state, gradients "
      "and parameters among them; 'mesh', which divides these within groups of workers, and layers as well; "
      "'localSGD', 'parameterServer' or 'independent'", field="config.strategy", compared=False),
    P("strategyParams", "dict[str, Any]", {},
      "options of the strategy, as docs/strategies.md lists them", field="config.strategy_params", compared=False),
    P("numWorkers", "int | tuple[int, int]", 1,
      "the number of barrier tasks, the world size (> 0); or (fewest, most): a fit then begins with the slots that "
      "are free, goes on with fewer after a worker is lost, and takes more when slots become free; without "
      "checkpointDir, it waits for the slots that the session's settings promise, and takes no more later",
      compared=False),
)

DEVICE = (
    P("device", "str", "auto",
      "'auto', 'cpu' or a type of accelerator, such as 'cuda', for training and for scoring; 'auto' takes one "
      "accelerator per task where there are any", field="launch.device", compared=False),
)

LAUNCH = (
    P("rendezvous", "str", "auto", "who hosts the store at which workers meet: 'auto', 'driver' or 'rank0'",
      field="launch.rendezvous", compared=False),
    P("preflight", "str", "basic",
      "what is checked before the job starts: 'basic' for settings, slots and GPUs, 'full' for the executors as "
      "well", field="request.preflight", compared=False),
    P("dryRun", "str", "driver",
      "where module and loss are tried on the first row before the job starts: on the 'driver', or in a "
      "'worker' for modules that need an accelerator, or more memory than the driver has",
      field="request.dry_run", compared=False),
)

RESULT = (
    P("modelDir", "str", None,
      "a folder, mounted on all hosts, into which the workers write the model, that of each fit in a folder of its "
      "own, so that neither the driver nor a worker ever holds all of it; for strategies that divide parameters: "
      "'zero2', 'zero3' and 'mesh'", compared=False),
)

CHECKPOINTS = (
    P("checkpointDir", "str", None,
      "path or URL of a directory that all workers can write, for checkpoints; a fit whose directory holds an "
      "unfinished training of the same configuration goes on with it", field="checkpoint.directory", compared=False),
    P("checkpointInterval", "int", 1,
      "epochs or steps from one checkpoint to the next (> 0)", field="checkpoint.interval", compared=False),
    P("checkpointUnit", "str", "epoch",
      "what checkpointInterval counts: 'epoch' or 'step'", field="checkpoint.unit", compared=False),
    P("keepCheckpoints", "int", 2, "number of checkpoints that are kept, besides that of the best validation (> 0)",
      field="checkpoint.keep", compared=False),
    P("maxRestarts", "int", 0,
      "how often a training that loses a worker is started again, from its last checkpoint if it has one (>= 0)",
      field="request.max_restarts", compared=False),
    P("minWorkers", "int", None,
      "the fewest workers, where numWorkers is the most; numWorkers=(fewest, most) says the same, and is preferred "
      "(> 0)", compared=False),
    P("growAfter", "float", 60.0,
      "the seconds that a fit trains with fewer workers than the most before it stops to take more (> 0)",
      field="request.grow_after", compared=False),
)

PATIENCE = (
    P("startTimeout", "float", 3600.0,
      "seconds that a fit waits for executors that are to come, and for slots which other jobs hold (> 0)",
      field="patience.start", compared=False),
    P("stallTimeout", "float", 600.0,
      "the seconds that a worker may stand still, or start after the first one, before the fit ends with an error "
      "that has its rank, its host and its Python stack (> 0)", field="patience.stall", compared=False),
    P("driverTimeout", "float", 30.0,
      "seconds without a sign of life from the driver after which a worker ends by itself (> 0)",
      field="patience.driver", compared=False),
    P("logLevel", "str", "WARNING",
      "the level from which on the driver shows what workers log; what they print counts as 'INFO'", compared=False),
)

SCORING = (
    P("handleInvalid", "str", "error",
      "what transform does with a row whose inputs are null or hold a null: 'error', 'keep' it with null results, or "
      "'skip' it, and then also a row that holds NaN or infinity", compared=False),
    P("predictBatchSize", "int | str", 2048,
      "the most rows that go through the module at a time when scoring (> 0); 'auto' begins with 2048, and halves "
      "them where the device has no memory for them", compared=False),
    P("predictPrecision", "str", "fp32", "'fp32', or 'bf16' or 'fp16' to score under autocast", compared=False),
    P("predictCompile", "bool", False,
      "whether to score through torch.compile; executors need a C++ compiler for it on CPUs", compared=False),
)

TRACKING = (
    P("progress", "bool", True, "whether fit shows a progress bar on the driver", compared=False),
    P("mlflowExperiment", "str", None,
      "name of the MLflow experiment, made if it is missing, in which each fit starts a run of its own, nested "
      "where a run is active", compared=False),
    P("mlflowRunName", "str", None,
      "name of the MLflow run that each fit starts for itself, nested where a run is active", compared=False),
)

# fmt: on
