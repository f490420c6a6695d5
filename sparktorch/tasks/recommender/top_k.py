"""The k largest scores of each row, exactly and with a fixed order of equal ones; without Spark."""

from __future__ import annotations

import torch

__all__ = ["NOTHING", "block_rows", "top_k"]

NOTHING = float("-inf")  # This is the score of an id that is no candidate.

_GROUP = 64  # Columns are searched in groups of this size.
_BLOCK_BYTES = 2 << 20  # The cache of a core holds about this number of bytes.


def block_rows(candidates: int) -> int:
    """Returns how many rows to score at a time, so that their scores, of 4 bytes each, stay in a core's cache."""
    return max(1, _BLOCK_BYTES // (4 * max(1, candidates)))


def top_k(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the k largest scores of each row and their columns, best first; of equal scores, the first column first.

    Scores are float32 of shape `(rows, columns)`, none of them NaN; both results have `min(k, columns)` columns.
    `torch.topk` breaks ties as it likes, and searches all columns. This function divides the columns into groups.
    The k groups with the best columns hold the k best columns: only these groups are searched.
    """
    rows, columns = scores.shape
    k = min(k, columns)
    groups = -(-columns // _GROUP)
    if groups * _GROUP != columns:
        scores = torch.nn.functional.pad(scores, (0, groups * _GROUP - columns), value=NOTHING)
    grouped = scores.view(rows, groups, _GROUP)
    best_groups = _sort_keys(grouped.amax(2)).topk(min(k, groups), dim=1, sorted=False).values
    # Groups are sorted by column, so that the first column's score stays the first of equal scores.
    groups_of_row = _columns(best_groups).sort(1).values
    candidates = grouped.gather(1, groups_of_row[:, :, None].expand(-1, -1, _GROUP)).flatten(1)
    indices = _columns(_sort_keys(candidates).topk(k, dim=1).values)
    best_columns = groups_of_row.gather(1, indices // _GROUP) * _GROUP + indices % _GROUP
    return candidates.gather(1, indices), best_columns


def _sort_keys(scores: torch.Tensor) -> torch.Tensor:
    """Returns int64 numbers in the order of the scores; of equal scores, the first column has the largest number.

    The upper 32 bits are the bits of the score. As whole numbers, they are in the order of the scores once the bits of
    negative scores are flipped. The lower 32 bits count the columns down.
    """
    bits = (scores + 0.0).view(torch.int32)  # Adding zero makes 0.0 of -0.0, whose bits differ.
    ordered_bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered_bits.long() << 32) | (0xFFFFFFFF - torch.arange(scores.shape[1]))


def _columns(sort_keys: torch.Tensor) -> torch.Tensor:
    """Returns the columns that are in the lower bits of sort keys."""
    return 0xFFFFFFFF - (sort_keys & 0xFFFFFFFF)
