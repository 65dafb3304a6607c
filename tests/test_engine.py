"""vLLM on 2 processes, as two engines and as one with tensor parallelism: tests/cases_engine.py."""

import pytest
from torchrun import case_names, run_cases


@pytest.mark.parametrize("tp", ["1", "2"])
@pytest.mark.parametrize("case", case_names("cases_engine"))
def test_engine(case: str, tp: str) -> None:
    error = run_cases("cases_engine", 2, TP=tp)[case]
    assert not error, error
