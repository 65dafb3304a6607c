"""What the cases of both rollout engines share: prompts for their tiny models, and what ranks agree on."""

import torch
import torch.distributed as dist

from common.data import Prompt
from launch import make_tiny

TOKENS = make_tiny.SPECIAL + make_tiny.CHARACTERS
LENGTHS = (33, 1, 90, 2, 64, 13, 31, 5, 65, 3, 32, 21, 8, 34, 55)  # of prompts, also just around the edges of blocks


def agreed(value: float) -> float:
    """The largest of all ranks'."""
    box = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(box, dist.ReduceOp.MAX)
    return box.item()


def make_prompts(seed: int, lengths: tuple[int, ...] = LENGTHS) -> list[Prompt]:
    g = torch.Generator().manual_seed(seed)
    many = [torch.randint(0, len(TOKENS), (length,), generator=g).tolist() for length in lengths]
    return [Prompt(ids=ids, text="", data_source="", ground_truth="", extra_info={}, index=i) for i, ids in enumerate(many)]
