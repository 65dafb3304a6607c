"""Megatron-Core's model in many parallel layouts on 1, 2, 4 and 8 processes: tests/cases_megatron.py. And the table of names against
mbridge's, which is for Transformer Engine's spec."""

import pytest
from torchrun import case_names, run_cases


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@pytest.mark.parametrize("case", case_names("cases_megatron"))
def test_megatron(case: str, world_size: int) -> None:
    error = run_cases("cases_megatron", world_size)[case]
    assert not error, error
