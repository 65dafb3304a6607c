"""Many cases in one torchrun: starting processes costs more than most checks do.

A case is a function in tests/cases_*.py, run on every rank. `run_cases` starts torchrun once for a module and a world
size and returns what became of each case; a test then asserts on its own. As a script, this file is what torchrun runs.
"""

import contextlib
import functools
import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent


def run(command: list[str], timeout: float, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command in the repository's root, killed with all its descendants at the time limit: nothing may hang."""
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        family = [*psutil.Process(process.pid).children(recursive=True), process]  # torchrun's workers lead groups of their own
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        output, _ = process.communicate()
        raise AssertionError(f"{command} ran past {timeout} s:\n{output[-4000:]}") from None
    return subprocess.CompletedProcess(command, process.returncode, output)


def torchrun(world_size: int, *command: str, timeout: float = 300, **environment: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    return run([*launcher, *command], timeout, **environment)


@functools.cache
def run_cases(module: str, world_size: int, timeout: float = 300, **environment: str) -> dict[str, str]:
    """{case: "" or the failing ranks' tracebacks}; a case that never ran because the process died says so."""
    with tempfile.TemporaryDirectory() as folder:
        done = torchrun(world_size, str(Path(__file__)), module, folder, timeout=timeout, **environment)
        results: dict[str, str] = {}
        for rank in range(world_size):
            path = Path(folder, f"{rank}.json")
            for name, error in (json.loads(path.read_text()) if path.exists() else {}).items():
                results[name] = results.get(name, "") + (f"rank {rank}: {error}\n" if error else "")
    for name in case_names(module):
        results.setdefault(name, f"never ran; exit code {done.returncode}:\n{done.stdout[-4000:]}")
    return results


def case_names(module: str) -> list[str]:
    """Names of the functions decorated with nothing but their prefix: found without importing torch."""
    lines = (ROOT / "tests" / f"{module}.py").read_text().splitlines()
    return [line[4 : line.index("(")] for line in lines if line.startswith("def case_")]


def main(module: str, folder: str) -> None:
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    if module != "cases_cuda":
        import launch.cpu_engines  # noqa: F401  before torch and vLLM

    cases = importlib.import_module(module)
    rank, results = int(os.environ["RANK"]), {}
    for name in case_names(module):
        try:
            getattr(cases, name)()
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
        Path(folder, f"{rank}.json").write_text(json.dumps(results))
        if results[name]:
            break  # the other ranks may be waiting inside this case
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
