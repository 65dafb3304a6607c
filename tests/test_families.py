"""Model families with real vLLM engines on 2 processes: tests/cases_families.py."""

import pytest
from torchrun import case_names, run_cases


@pytest.mark.parametrize("case", case_names("cases_families"))
def test_family(case: str) -> None:
    error = run_cases("cases_families", 2)[case]
    assert not error, error
