"""Whether layers that a plan divides fit each other, tried in one process and before the job."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.utils import _pytree as pytree

from sparktorch.base.batch import Batch
from sparktorch.base.quiet import quiet
from sparktorch.errors import ModuleError
from sparktorch.train.arguments import Arguments
from sparktorch.train.huggingface.models import arguments, without_caches
from sparktorch.train.numerics.determinism import generators_state, untouched_generators

__all__ = ["check_shapes", "check_values", "check_width"]

_PARAM = "strategyParams"
_FAKES = "torch._subclasses.fake_tensor"  # logs the tracebacks of errors, which are raised, too


def check_width(name: str, size: int, part: Any, inputs: Any) -> None:
    """Refuses an input of a layer that is divided by "rowwise" which is not divided; a hook.

    Raises:
        ModuleError: It has another number of features than a part.
    """
    width = inputs[0].shape[-1]
    if width * size != part.in_features:
        raise ModuleError(
            f"{name!r} is divided by 'rowwise' and gets {width} features in each of {size} ranks, not "
            f"{part.in_features // size}",
            hint="what it takes must be the divided output of a 'colwise' layer",
            param=_PARAM,
        )


def check_shapes(module: nn.Module, styles: Mapping[str, str], size: int, batch: Batch) -> None:
    """Calls a copy of a module, without values, whose divided layers return and take as many numbers as in a rank.

    It is called as in training. Nothing is said of a module that cannot be called with a batch, as one of which a
    training step uses parts, that looks at values, or that cannot be copied.

    Args:
        module: The module.
        styles: The style of each layer that is divided, by its name.
        size: Number of ranks that share a layer.
        batch: A few rows.

    Raises:
        ModuleError: A layer gets a part where it takes all numbers, or all where it takes a part.
    """
    given, trial = _given(module, batch), _Trial(size)
    try:
        whole, parts = (_Outline(module) for _ in range(2))  # what one call keeps is none of the other
        whole.call(given.call, given.tensors)
        trial.watch(parts.module, styles)
    except Exception:
        return
    try:
        parts.call(given.call, given.tensors)
    except ModuleError:
        raise
    except Exception as error:
        if not trial.cut:
            return
        raise _fails(trial.place or type(module).__name__, size, trial.cut, error) from error


def check_values(module: nn.Module, styles: Mapping[str, str], size: int, batch: Batch) -> None:
    """Refuses plans by which a rank computes something else than the whole module.

    A copy of the module with the same parameters is called twice in evaluation, the second time with a rank's columns
    of divided outputs alone. What "rowwise" layers take must be the rank's columns of what they took in the first call,
    and what the module returns must be the same. Nothing is said of a module without values, of one that cannot be
    copied or called, that takes gradients in its forward pass, or draws numbers for what is divided.

    Args:
        module: The module.
        styles: The style of each layer that is divided, by its name.
        size: Number of ranks that share a layer.
        batch: A few rows.

    Raises:
        ModuleError: A rank computes something else.
    """
    given = _given(module, batch)
    if any(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in (*module.parameters(), *given.tensors)):
        return
    comparison = _Comparison(module, styles, size)
    try:
        comparison.whole(given)
    except Exception:
        return
    for rank in sorted({0, size - 1}):
        differs = comparison.part(given, rank)
        if differs:
            divided = ", ".join(map(repr, comparison.divided))
            raise ModuleError(
                f"strategyParams.plan: {differs} differs from that of the whole module, with its columns of what is "
                f"divided by 'colwise': {divided}",
                hint="between 'colwise' and 'rowwise', functions must take each column by itself, as activations do, "
                "or each head of a fixed size, as by view(..., -1, head_size); divide the layer by "
                "'colwise_gather_output', or leave both whole",
                param=_PARAM,
            )


class _Outline:
    """A copy of a module that has shapes and no values, and takes no memory."""

    def __init__(self, module: nn.Module) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

        plain = [value for part in module.modules() for value in vars(part).values() if isinstance(value, FakeTensor)]
        held = [*module.parameters(), *module.buffers(), *plain]
        fakes = [tensor for tensor in held if isinstance(tensor, FakeTensor)]
        self._mode = fakes[0].fake_mode if fakes else FakeTensorMode(allow_non_fake_inputs=True)
        known: dict[int, Any] = {}
        for tensor in held:
            fake = self._fake(tensor)
            is_parameter = isinstance(tensor, nn.Parameter)
            known[id(tensor)] = nn.Parameter(fake, requires_grad=tensor.requires_grad) if is_parameter else fake
        with unset_fake_temporarily():
            self.module: nn.Module = without_caches(copy.deepcopy(module, known))

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")

    def call(self, run: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Any:
        """Calls the module, the first argument of `run`, in training mode, with tensors of these shapes."""
        self.module.train()
        with torch.random.fork_rng(devices=[]), quiet(_FAKES), self._mode, torch.no_grad():
            return run(self.module, *map(self._fake, tensors))


def _fails(place: str, size: int, cut: dict[str, None], error: Exception) -> ModuleError:
    """Returns the error of a part that fails in a rank."""
    return ModuleError(
        f"strategyParams.plan: in each of {size} ranks, {place} fails with a part of an output that is divided by "
        f"'colwise', of {', '.join(map(repr, reversed(cut)))}: {error}",
        hint="divide what takes it by 'rowwise', or what returns it by 'colwise_gather_output'",
        param=_PARAM,
    )


def _given(module: nn.Module, batch: Batch) -> Arguments:
    """Returns what a module is called with, but for labels, of which one of transformers computes its loss."""
    args, kwargs = arguments(batch, module)
    kwargs.pop("labels", None)
    return Arguments.of(args, kwargs)


class _Comparison:
    """Calls of a module in evaluation: a whole one, and those with one rank's columns of divided outputs.

    Attributes:
        divided: Names of the layers whose outputs were divided, in the order of their calls.
    """

    def __init__(self, module: nn.Module, styles: Mapping[str, str], size: int) -> None:
        self.divided: dict[str, None] = {}
        self._size = size
        self._module, self._styles = module, styles
        self._taken: list[torch.Tensor] = []  # what "rowwise" layers took in the whole call, one after another
        self._returned: list[torch.Tensor] = []  # and what they returned
        self._found: list[torch.Tensor] = []
        self._drawn: dict[str, Any] = {}  # the states of generators at its end
        self._unknown = False

    def whole(self, given: Arguments) -> None:
        """Calls the module as it is."""

        def keep(part: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            self._taken.append(inputs[0].clone())
            self._returned.append(output.clone())

        self._found, self._drawn = self._call(given, lambda name, part: part.register_forward_hook(keep))

    def part(self, given: Arguments, rank: int) -> str:
        """Calls it as a rank does; returns what is another there, an empty text if nothing is, or if that is not known.

        Raises:
            ModuleError: It fails with a rank's columns.
        """
        expected = iter([*zip(self._taken, self._returned, strict=True)])
        returned: list[torch.Tensor | None] = []
        differs: list[str] = []

        def compare(name: str, part: Any, inputs: Any) -> Any:
            check_width(name, self._size, part, inputs)
            taken, summed = next(expected, (None, None))
            returned.append(summed)
            if taken is None or not _close(inputs[0], taken.chunk(self._size, -1)[rank]):
                differs.append(f"what {name!r} takes in a rank")
            return _filled(part, inputs)

        def watch(name: str, part: nn.Module) -> None:
            part.register_forward_pre_hook(partial(compare, name))
            part.register_forward_hook(lambda part, inputs, output: returned.pop())  # the sum over the ranks

        try:
            found, drawn = self._call(given, watch, rank=rank)
            same = len(found) == len(self._found) and all(map(_close, found, self._found))
        except ModuleError:
            raise
        except Exception as error:
            if self._unknown or not self.divided:
                return ""
            if differs:
                return differs[0]
            raise _fails(f"{type(self._module).__name__}, in evaluation,", self._size, self.divided, error) from error
        if self._unknown or not _equal(drawn, self._drawn):
            return ""
        return (differs or ["" if same else f"what {type(self._module).__name__} returns"])[0]

    def _call(
        self, given: Arguments, watch: Callable[[str, nn.Module], Any], *, rank: int | None = None
    ) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """Calls a copy of the module, for what one call keeps is none of the other.

        Returns:
            The tensors that it returns, and the states of generators at its end.
        """
        same: dict[int, Any] = {id(parameter): parameter for parameter in self._module.parameters()}
        module = without_caches(copy.deepcopy(self._module, same))
        module.eval()  # dropout draws other numbers for a part
        for name, part in module.named_modules():
            if isinstance(part, nn.TransformerEncoder):
                part.use_nested_tensor = False  # as where it is divided
            if self._styles.get(name) == "colwise":
                part.register_forward_hook(partial(self._change, name, rank))
            if self._styles.get(name) == "rowwise" and isinstance(part, nn.Linear):
                watch(name, part)
        tensors = [tensor.clone() for tensor in given.tensors]  # which the module may change in place
        device = torch.device("cpu")
        with untouched_generators(device), torch.no_grad():
            found = pytree.tree_leaves(given.call(module, *tensors))
            return [leaf for leaf in found if isinstance(leaf, torch.Tensor)], generators_state(device)

    def _change(self, name: str, rank: int | None, part: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        """Gives a divided layer other outputs, which are not all equal."""
        self.divided[name] = None
        self._unknown |= torch.is_grad_enabled()  # the forward pass takes gradients, which these outputs have not
        noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
        other = output + noise * (1 + output.abs())
        return other if rank is None else other.chunk(self._size, -1)[rank].contiguous()


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors are the same but for rounding, or cannot be compared."""
    if any(tensor.is_nested or tensor.layout is not torch.strided for tensor in (one, other)):
        return True
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if other.is_complex():
        return _close(torch.view_as_real(one), torch.view_as_real(other))
    if not other.dtype.is_floating_point or not other.numel():
        return torch.equal(one, other)
    rounding = max(1e-5, 8 * torch.finfo(other.dtype).eps)
    one, other = one.detach().double(), other.detach().double()
    largest = float(other.nan_to_num(posinf=0.0, neginf=0.0).abs().max())
    return torch.allclose(one, other, rtol=max(1e-3, rounding), atol=rounding * largest + 1e-6, equal_nan=True)


def _equal(drawn: Any, other: Any) -> bool:
    """Whether two states of generators are the same."""
    if isinstance(drawn, torch.Tensor):
        return torch.equal(drawn, other)
    if isinstance(drawn, Mapping):
        return all(_equal(value, other[name]) for name, value in drawn.items())
    if isinstance(drawn, list):
        return all(map(_equal, drawn, other))
    return bool(drawn == other)


class _Trial:
    """Hooks that leave layers the numbers of one rank.

    Attributes:
        cut: Names of the layers whose outputs were cut, in the order of their calls.
    """

    def __init__(self, size: int) -> None:
        self.cut: dict[str, None] = {}
        self._size = size
        self._called: list[str] = []  # what is being called, the outer parts first

    @property
    def place(self) -> str:
        """The name of the part that is being called, in quotes; empty if it is the module itself."""
        return repr(self._called[-1]) if self._called and self._called[-1] else ""

    def watch(self, module: nn.Module, styles: Mapping[str, str]) -> None:
        for name, part in module.named_modules():
            before, after = part.register_forward_pre_hook, part.register_forward_hook
            before(partial(self._enter, name))
            if styles.get(name) in ("colwise", "rowwise"):
                before(partial(_check_positional, name))
            if styles.get(name) == "rowwise" and isinstance(part, nn.Linear):
                before(partial(check_width, name, self._size))
                before(_filled)
            if styles.get(name) == "colwise":
                after(partial(self._cut, name))
            after(self._leave)

    def _enter(self, name: str, part: nn.Module, inputs: Any) -> None:
        self._called.append(name)

    def _leave(self, part: nn.Module, inputs: Any, output: Any) -> None:
        self._called.pop()

    def _cut(self, name: str, part: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        self.cut[name] = None
        return output[..., : output.shape[-1] // self._size]


def _check_positional(name: str, part: nn.Module, inputs: Any) -> None:
    if not inputs:
        raise ModuleError(
            f"{name!r} is divided, and its input is passed by keyword",
            hint="pass it by position",
            param=_PARAM,
        )


def _filled(part: Any, inputs: Any) -> Any:
    """Fills a part with zeros up to what the whole layer takes; a hook."""
    return (nn.functional.pad(inputs[0], (0, part.in_features - inputs[0].shape[-1])), *inputs[1:])
