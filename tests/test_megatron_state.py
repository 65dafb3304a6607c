"""Megatron's optimizer, offloading and checkpoints on 1, 2 and 4 processes: tests/cases_megatron_state.py."""

import pytest
from torchrun import case_names, run_cases


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("case", case_names("cases_megatron_state"))
def test_megatron_state(case: str, world_size: int) -> None:
    error = run_cases("cases_megatron_state", world_size)[case]
    assert not error, error
