"""The placement of a parameter that holds several weights as blocks of rows, of each of which a rank has a part."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import _StridedShard

from sparktorch.errors import ModuleError

__all__ = ["Packed"]


class Packed(_StridedShard):
    """Torch's placement of blocks, which `fully_shard` divides further.

    It divides the rows that a rank has of all blocks together. Torch's placements cannot express that, and gathers of
    its own would put the rows together in another order.
    """

    def _to_replicate_tensor(self, local_tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int, *shape: Any) -> Any:
        """Gathers a tensor along the mesh's dimension.

        Raises:
            ModuleError: Its rows are sharded, too.
        """
        names = mesh.mesh_dim_names or ()
        if any(name.startswith("shard") and mesh.size(i) > 1 for i, name in enumerate(names)):
            raise ModuleError(
                "torch does not know the order of the rows of attention's packed projections, which are divided by "
                "heads and sharded",
                hint="use context.state_dict(module) instead of full_tensor or torch.distributed.checkpoint, or divide "
                "attention without strategyParams.shard",
                param="strategyParams",
            )
        return super()._to_replicate_tensor(local_tensor, mesh, mesh_dim, *shape)
