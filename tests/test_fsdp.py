"""FSDP2 on 1, 2 and 4 processes: tests/cases_fsdp.py."""

import pytest
from torchrun import case_names, run_cases


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("case", case_names("cases_fsdp"))
def test_fsdp(case: str, world_size: int) -> None:
    error = run_cases("cases_fsdp", world_size)[case]
    assert not error, error
