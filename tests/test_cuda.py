"""What only CUDA does: tests/cases_cuda.py, where there is a GPU."""

import pytest
import torch
from torchrun import case_names, run_cases


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", case_names("cases_cuda"))
def test_cuda(case: str) -> None:
    error = run_cases("cases_cuda", min(torch.cuda.device_count(), 2))[case]
    assert not error, error
