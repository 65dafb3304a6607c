"""FSDP2's strategies and offloading on 1, 2 and 4 processes: tests/cases_strategies.py."""

import functools
import tempfile

import pytest
from torchrun import case_names, run_cases


@functools.cache
def reference() -> str:
    """The folder with one process' numbers."""
    folder = tempfile.mkdtemp()
    run_cases("cases_strategies", 1, REFERENCE=folder)
    return folder


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("case", case_names("cases_strategies"))
def test_strategies(case: str, world_size: int) -> None:
    error = run_cases("cases_strategies", world_size, REFERENCE=reference())[case]
    assert not error, error
