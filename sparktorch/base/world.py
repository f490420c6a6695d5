"""A process's rank among the others, as a value that is computed once and passed on."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["World"]


@dataclass(frozen=True, kw_only=True)
class World:
    """One rank in the process group: its numbers, its host and its device.

    Attributes:
        rank: This rank, `0 <= rank < world_size`.
        world_size: Number of ranks.
        local_rank: This rank's index among the ranks on its host.
        local_size: Number of the job's ranks on its host.
        host: The host as the cluster manager names it.
        address: The local IP address that reaches the other ranks; empty to let torch choose.
        device: The torch device on which this rank trains: "cpu", or an accelerator with its index, such as "cuda:1".
        threads: Number of intra-op threads that torch may use in this rank.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
    host: str = "localhost"
    address: str = ""
    device: str = "cpu"
    threads: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.world_size, (self.rank, self.world_size)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that reports for all."""
        return self.rank == 0
