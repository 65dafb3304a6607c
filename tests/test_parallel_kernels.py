"""Vocab-parallel log-prob and context-parallel attention on 1, 2 and 4 processes: tests/cases_parallel_kernels.py."""

import pytest
from torchrun import case_names, run_cases


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("case", case_names("cases_parallel_kernels"))
def test_parallel_kernels(case: str, world_size: int) -> None:
    error = run_cases("cases_parallel_kernels", world_size)[case]
    assert not error, error
