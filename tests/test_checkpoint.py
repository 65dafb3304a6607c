"""common/checkpoint.py on 2 processes, then on 1, which reads what the 2 left: tests/cases_checkpoint.py."""

import pytest
from torchrun import case_names, run_cases


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, str]]:
    shared = str(tmp_path_factory.mktemp("shared"))
    return {world_size: run_cases("cases_checkpoint", world_size, timeout=120, CHECKPOINT_CASES=shared) for world_size in (2, 1)}


@pytest.mark.parametrize("world_size", [2, 1])
@pytest.mark.parametrize("case", case_names("cases_checkpoint"))
def test_checkpoint(results: dict[int, dict[str, str]], case: str, world_size: int) -> None:
    error = results[world_size][case]
    assert not error, error
