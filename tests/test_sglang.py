"""SGLang's engine on a CPU, of a dense model and of a mixture of experts with tensor parallelism: tests/cases_sglang.py."""

import pytest
from torchrun import case_names, run_cases


@pytest.mark.parametrize(("model", "tp"), [("dense", 1), ("moe", 2)])
@pytest.mark.parametrize("case", case_names("cases_sglang"))
def test_sglang(case: str, model: str, tp: int) -> None:
    error = run_cases("cases_sglang", tp, MODEL=model)[case]
    assert not error, error
