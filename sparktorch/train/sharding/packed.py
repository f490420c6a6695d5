"""The placement of a parameter that holds several weights as blocks of rows, of each of which a rank has a part."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import _StridedShard

from sparktorch.errors import ModuleError

__all__ = ["Packed"]


class Packed(_StridedShard):
    """Torch's placement of blocks, which `fully_shard` may divide further.

    It divides the rows that a rank has of all blocks together. Torch's placements cannot express that, and gathers of
    its own would put the rows together in another order. The number of blocks is negative then: operators, which make
    a plain `_StridedShard` of this, pass it on, and torch cannot split what they return into so many blocks either.
    """

    @classmethod
    def of(cls, blocks: int, mesh: DeviceMesh) -> Packed:
        """Returns the placement of `blocks` weights along a mesh dimension, of whose other dimensions one may shard."""
        root = mesh._get_root_mesh()
        names = root.mesh_dim_names or ()
        sharded = any(name.startswith("shard") and root.size(i) > 1 for i, name in enumerate(names))
        return cls(0, split_factor=-blocks if sharded else blocks)

    def _split_tensor(self, tensor: torch.Tensor, num_chunks: int, **options: Any) -> Any:
        """Splits a tensor as the ranks have it, for gathers and offsets; refuses rows that are sharded, too."""
        if self.split_factor < 0:
            raise ModuleError(
                "torch does not know the order of the rows of attention's packed projections, which are divided by "
                "heads and sharded",
                hint="use context.state_dict(module) instead of full_tensor or torch.distributed.checkpoint, or divide "
                "attention without strategyParams.shard",
                param="strategyParams",
            )
        return super()._split_tensor(tensor, num_chunks, **options)
