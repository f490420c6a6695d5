"""Networks that compute something between their layers, for pipelines, which cut there."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.support.nets import Chain, Paired

__all__ = [
    "Adding",
    "Attending",
    "Clamping",
    "Detouring",
    "Doubling",
    "Filling",
    "Keeping",
    "Sharing",
    "Shifting",
    "Ticking",
    "Turned",
    "Widened",
    "Winding",
    "in_place",
    "normed",
]


class Doubling(Chain):
    """Has hooks on a layer and on itself, a part that is not trained, and one that computes in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].register_forward_hook(lambda part, args, out: out * 2)
        self.layers[2].register_forward_pre_hook(lambda part, args: (args[0] * 2,))
        self.register_forward_hook(lambda part, args, out: out * 1.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = x > 0
        mask[:, 0] = True
        with torch.no_grad():
            out = self.enter(x) * mask.float().mean(1, keepdim=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = out + self.layers[0](out)
        for layer in self.layers[1:]:
            out = out + torch.tanh(layer(out.float()))
        result: torch.Tensor = self.out(out).squeeze(-1)
        return result


class Winding(nn.Module):
    """Uses a part in every stage, and passes on numbers, masks, transposed values and some without gradients.

    A part has the weight of another under a name that nobody calls, and is defined before it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 8)
        self.enter = nn.Linear(5, 8)
        self.head.weight = self.enter.weight
        self.side = nn.Linear(5, 8)
        self.middle = nn.Linear(2, 8)
        self.matrix = nn.Parameter(torch.eye(8) / 2)
        self.factor = nn.Parameter(torch.tensor(0.9))
        self.pair = nn.ParameterDict({"up": nn.Parameter(torch.ones(8)), "down": nn.Parameter(torch.zeros(8))})
        self.act = nn.Tanh()
        self.out = nn.Linear(8, 1)
        self.only_in_evaluation = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        side = self.side(x)
        out = self.act(self.enter(x)) * self.pair["up"] * self.factor
        largest, positive = out.argmax(1), out > 0
        out = self.act(self.middle(out.view(-1, 2, 4).transpose(1, 2))).mean(1)
        one, other = out.unflatten(1, (2, 4)).unbind(1)
        out = torch.cat([one * 2, other], 1) @ self.matrix + self.pair["down"]
        out[positive] = 0.5
        result: torch.Tensor = self.out(self.act(out + side.detach())) + torch.nn.functional.one_hot(largest, 8)[:, :1]
        if not self.training:
            result = self.only_in_evaluation(result)
        return result.squeeze(-1)


class Sharing(nn.Module):
    """Blocks with an activation of their own, one of which is also called between blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.GELU()
        acts = (nn.Tanh(), self.act, nn.Tanh(), nn.Tanh(), nn.Tanh())
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), act) for act in acts)
        self.head = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        found: torch.Tensor = self.head(self.act(x)).squeeze(-1)
        return found


class _Scaled(nn.Linear):
    """Computes with buffers, one of which no state dict has, and with a tensor that is neither."""

    factor: torch.Tensor
    shift: torch.Tensor

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.register_buffer("factor", torch.empty(1))
        self.register_buffer("shift", torch.empty(1), persistent=False)
        self.plain = torch.empty(1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "plain"):  # not yet where the layer is made
            for made, value in ((self.factor, 1.4), (self.shift, 0.3), (self.plain, 0.7)):
                nn.init.constant_(made, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.factor + self.shift * self.plain


class Keeping(Paired):
    """Has a parameter between layers, one under two names, and a buffer of the last layer that the first stage reads.

    The same layer is a part under two names, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((5,), 1.1))
        self.head = nn.Linear(1, 1)
        self.out = _Scaled()
        self.head.weight = self.out.weight
        self.aliases = nn.ModuleDict({"out": self.out})

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.constant_(self.gain, 1.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x * self.gain * self.out.factor)
        result: torch.Tensor = self.out(out.unsqueeze(-1)).squeeze(-1)
        return result


class _Steps(nn.Module):
    """A layer into 8 units, three among them, and one out of `last` units."""

    def __init__(self, last: int = 8) -> None:
        super().__init__()
        self.enter = nn.Linear(5, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.out = nn.Linear(last, 1)


class Ticking(_Steps):
    """Changes in place, between layers, a time and a mask that inputs alone decide."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, time, mask = self.enter(x), torch.zeros(len(x), 1), torch.zeros(len(x), 8, dtype=torch.bool)
        for place, layer in enumerate(self.layers):
            mask = mask.clone()  # the one before is kept for the backward pass
            mask[:, 2 * place : 2 * place + 4] = True
            out = out + torch.tanh(layer(out + time)) * mask
            time += 0.5
        result: torch.Tensor = self.out(out).squeeze(-1)
        return result


class Shifting(_Steps):
    """Writes values that need gradients into zeros, by views."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.tanh(self.enter(x))
        for layer in self.layers:
            shifted = torch.zeros_like(out)
            shifted[:, 1:] = out[:, :-1]
            out = torch.tanh(layer(shifted))
        result: torch.Tensor = self.out(out).squeeze(-1)
        return result


class Adding(_Steps):
    """Adds to what needs gradients, in place and without them, what layers return."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.tanh(self.enter(x))
        total = out * 2
        for layer in self.layers[:2]:
            found = layer(out)
            with torch.no_grad():
                total += found
        result: torch.Tensor = self.out(self.layers[2](total)).squeeze(-1)
        return result


class Detouring(_Steps):
    """Passes on what needs gradients where there are none: as it is, by operators and by a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.tanh(self.enter(x))
        for place, layer in enumerate(self.layers):
            with torch.no_grad():
                out = self.same(out) if place == 1 else out.float().to("cpu")
            out = torch.tanh(layer(out))
        result: torch.Tensor = self.out(out).squeeze(-1)
        return result


class Filling(_Steps):
    """Writes what its layers return into zeros that the first stage makes, by views, and adds it up in place."""

    def __init__(self) -> None:
        super().__init__(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.tanh(self.enter(x))
        found, plain, total = out.new_zeros(len(x), 2, 8), torch.zeros(len(x), 8), torch.zeros_like(out)
        for place, layer in enumerate(self.layers):
            out = torch.tanh(layer(out))
            torch._foreach_add_([total], [out])  # it returns nothing
            (found[:, place] if place < 2 else plain)[:] = out
        result: torch.Tensor = self.out(torch.cat([found.flatten(1), plain, total], 1)).squeeze(-1)
        return result


class Clamping(_Steps):
    """Changes its input in place, itself and by its first layer, and reads it in other layers, too."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=True)
        self.skip = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x[x < -1] = 1
        out = self.enter(self.act(x))
        for layer in self.layers:
            out = torch.tanh(layer(out)) * (x > 0).float().mean(1, keepdim=True)
        result: torch.Tensor = (self.out(out) + self.skip(x)).squeeze(-1)
        return result


def in_place() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(inplace=True), nn.Linear(8, 1), nn.Flatten(0))


def normed() -> nn.Module:
    norm: Any = nn.utils.parametrizations.weight_norm
    return nn.Sequential(norm(nn.Linear(5, 8)), nn.Tanh(), norm(nn.Linear(8, 8)), nn.Linear(8, 1), nn.Flatten(0))


class Widened(nn.Module):
    """Changes what `reshape` makes of an expanded value: a copy of it."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.mid, self.out = nn.Linear(5, 8), nn.Linear(8, 24), nn.Linear(24, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.enter(x).unsqueeze(1).expand(-1, 3, -1)
        middle = self.mid(wide.mean(1))
        flat = wide.reshape(-1, 24)
        flat += torch.tanh(middle)
        out: torch.Tensor = self.out(torch.tanh(flat) + 2.0 * wide.reshape(-1, 24)).squeeze(-1)
        return out


class Turned(nn.Module):
    """Changes what `reshape` makes of a value in another layout: a copy of it."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.mid, self.out = nn.Linear(5, 8), nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = self.enter(x).view(-1, 2, 4).transpose(1, 2)
        middle = self.mid(turned.mean(2))
        flat = turned.reshape(-1, 8)
        flat += torch.tanh(middle)
        out: torch.Tensor = self.out(torch.tanh(flat) + 2.0 * turned.reshape(-1, 8)).squeeze(-1)
        return out


class Attending(nn.Module):
    """Blocks of attention, whose queries, keys and values one layer computes, with norms before; rows of 5 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(1, 8)
        self.norms, self.packed, self.out = (
            nn.ModuleList(make() for _ in range(3))
            for make in (lambda: nn.LayerNorm(8), lambda: nn.Linear(8, 24), lambda: nn.Linear(8, 8))
        )
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.enter(x.unsqueeze(-1))
        for norm, packed, out in zip(self.norms, self.packed, self.out, strict=True):
            query, key, value = packed(norm(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(query, key, value)
            x = x + out(mixed.transpose(1, 2).flatten(2))
        one, other = self.head(x.mean(1)).chunk(2, 1)
        return one.squeeze(1), other.squeeze(1).detach()
