"""common/rewards.py: the rules against worked examples, and a pool that must survive whatever an answer does to it."""

import datetime
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from common import rewards
from common.rewards import RewardPool, overlong_penalty

REPO = Path(__file__).resolve().parents[1]
HOSTILE = """
import ctypes, os, sys, time

def fn(answer, ground_truth, extra_info):
    print("noise on stdout", flush=True)
    os.write(1, b"raw noise on fd 1\\n")
    match answer:
        case "sleep": time.sleep(3600)
        case "loop":
            while True: pass
        case "hold the GIL": ctypes.PyDLL(None).sleep(3600)  # neither signals nor threads of Python run meanwhile
        case "close": os.closerange(3, 1000); time.sleep(3600)
        case "crash": os._exit(3)
        case "quiet crash": os._exit(0)
        case "segfault": ctypes.string_at(0)
        case "exit": sys.exit("bye")
        case "raise": raise KeyError("first line\\nsecond line")
        case "none": return None
        case "nan": return float("nan")
        case "inf": return {"score": float("inf")}
        case "huge": return 10**400
        case "text": return "1.0"
        case "no score": return {"accuracy": 1.0}
        case "dict": return {"score": True, "length": 7, "ratio": 0.5, "bad": float("nan"), "note": "kept out"}
        case "stdin": return float(sys.stdin.read() == "")
        case "echo": return {"score": float(extra_info["said"] == ground_truth)}
    return float(answer)

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float((data_source, solution_str, ground_truth, extra_info) == ("source", "answer", "truth", {"k": 1}))

def slow(answer, ground_truth, extra_info):
    time.sleep(0.2)
    return float(answer)

number = 3
"""


def item(answer: str, ground_truth: str = "", data_source: str = "", extra_info: dict | None = None) -> dict:
    return {
        "data_source": data_source,
        "answer": answer,
        "ground_truth": ground_truth,
        "extra_info": extra_info or {},
    }


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    path = tmp_path_factory.mktemp("reward") / "hostile.py"
    path.write_text(HOSTILE)
    return str(path)


@pytest.fixture(scope="module")
def pool(hostile):
    with RewardPool(f"{hostile}:fn", workers=3, timeout_s=1.5) as pool:
        yield pool


# ---- rules ----


@pytest.mark.parametrize(
    ("answer", "truth", "strict", "flexible"),
    [
        ("so #### 42", "42", 1, 1),
        ("#### 42.0", "42", 1, 1),
        ("#### 42.", "42.00", 1, 1),
        ("####42", "42", 1, 1),
        ("#### $1,234.50", "1234.5", 1, 1),
        ("#### -$7", "-7", 1, 1),
        ("#### $-7", "-7", 1, 1),
        ("#### -.5", "-0.5", 1, 1),
        ("#### 7", "-7", 0, 0),
        ("#### 1\n#### 2", "2", 1, 1),
        ("#### 2\n#### 1", "2", 0, 0),
        ("#### 42" + " and so on" * 100, "42", 1, 1),
        ("#### 42, as 6 * 7", "42", 1, 0),
        ("the answer is 42", "42", 0, 1),
        ("10-5", "5", 0, 1),
        ("10 = -5", "-5", 0, 1),
        ("#### forty-two", "42", 0, 0),
        ("", "42", 0, 0),
        ("#### ", "42", 0, 0),
        ("<think>is it #### 41?</think> No. #### 42", "42", 1, 1),
        ("<think>#### 42", "42", 1, 1),
        ("#### 9007199254740993", "9007199254740992", 0, 0),  # equal as floats
        ("#### 1,000", "1,000", 1, 1),
    ],
)
def test_gsm8k(answer, truth, strict, flexible):
    assert rewards.gsm8k(answer, truth, {}) == {"score": strict, "flexible": flexible}
    assert rewards.gsm8k_flexible(answer, truth, {}) == {"score": flexible, "strict": strict}


def test_gsm8k_needs_a_number_as_truth():
    with pytest.raises(ValueError, match="number as ground truth, got 'many'"):
        rewards.gsm8k("#### 42", "many", {})


@pytest.mark.parametrize(
    ("answer", "truth", "score"),
    [
        (r"\boxed{0.5}", r"\frac{1}{2}", 1),
        (r"\boxed{\frac12}", "0.5", 1),
        (r"\boxed{\frac{1}{2}}", r"\boxed{0.5}", 1),
        (r"\boxed{1 + x^2}", "x^2+1", 1),
        ("it is $7$", "7", 1),
        (r"\boxed{(1,2]}", "(1,2)", 0),
        (r"\boxed{3}", "4", 0),
        (r"\boxed{\frac{1}{", "4", 0),
        ("", "4", 0),
        (r"<think>perhaps \boxed{3}</think> \boxed{4}", "4", 1),
        (r"<think>\boxed{4}", "4", 1),
    ],
)
def test_math(answer, truth, score):
    assert rewards.math(answer, truth, {}) == score


def test_math_needs_a_truth():
    with pytest.raises(ValueError, match="cannot parse the ground truth"):
        rewards.math(r"\boxed{4}", "", {})


def test_exact():
    assert rewards.exact(" a b\n", "a b", {}) == 1.0
    assert rewards.exact("a  b", "a b", {}) == 0.0


@pytest.mark.parametrize("source", ["lighteval/MATH", "HuggingFaceH4/MATH-500", "math", "math_dapo", "aime24"])
def test_auto_math(source):
    assert rewards.auto(source, r"\boxed{0.5}", "1/2", {}) == 1.0


def test_auto_others():
    assert rewards.auto("openai/gsm8k", "#### 42", "42", {}) == {"score": 1.0, "flexible": 1.0}
    assert rewards.auto("mine", r"\boxed{42}", "42", {}) == 0.0
    assert rewards.auto("mine", "42", "42", {}) == 1.0


def test_overlong_penalty_is_dapo_equation_13():
    def reference(length: int, maximum: int, cache: int) -> float:
        if length <= maximum - cache:
            return 0.0
        return ((maximum - cache) - length) / cache if length <= maximum else -1.0

    for length in range(30):
        assert overlong_penalty(length, 20, 5) == pytest.approx(reference(length, 20, 5))
        assert overlong_penalty(length, 20, 20, factor=0.5) == pytest.approx(0.5 * reference(length, 20, 20))
    for buffer in (0, 21):
        with pytest.raises(ValueError, match="overlong buffer must be 1 to 20"):
            overlong_penalty(1, 20, buffer)


# ---- the pool ----


def test_import_is_light():
    code = "import sys, common.rewards; print([m for m in ('torch', 'numpy', 'math_verify') if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True).stdout
        == "[]\n"
    )


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ("sleep", "no result within 1.5 s"),
        ("loop", "no result within 1.5 s"),
        ("hold the GIL", "no result within 1.5 s"),
        ("crash", "the reward process died with exit code 3"),
        ("quiet crash", "the reward process died with exit code 0"),
        ("segfault", "the reward process died with exit code -11"),
        ("close", "the reward process died with exit code -9"),
        ("exit", "SystemExit: bye"),
        ("raise", r"KeyError: 'first line\nsecond line'"),
        ("none", "finite number or a dict with one as 'score', got None"),
        ("nan", "got nan"),
        ("inf", "got {'score': inf}"),
        ("huge", "OverflowError"),
        ("text", "got '1.0'"),
        ("no score", "got {'accuracy': 1.0}"),
    ],
)
def test_a_bad_answer_costs_itself_only(pool, answer, error):
    results = pool.score([item("1"), item("2"), item(answer), item("3"), item("4"), item("5")])
    assert [r.score for r in results] == [1, 2, 0, 3, 4, 5]
    assert [r.error is None for r in results] == [True, True, False, True, True, True]
    assert error in results[2].error
    assert "\n" not in results[2].error
    assert results[2].metrics == {}


def test_more_bad_answers_than_workers(pool):
    names = ["loop", "crash", "sleep", "segfault", "hold the GIL", "exit", "crash", "crash", "quiet crash", "none"]
    results = pool.score([x for index, name in enumerate(names) for x in (item(name), item(str(index)))])
    assert [r.error is None for r in results] == [False, True] * len(names)
    assert [r.score for r in results[1::2]] == list(range(len(names)))


def test_values_and_metrics(pool):
    (result,) = pool.score([item("dict")])
    assert (result.score, result.metrics, result.error) == (1.0, {"length": 7.0, "ratio": 0.5}, None)
    assert pool.score([item("stdin")])[0].score == 1.0
    assert pool.score([]) == []


def test_unicode_dates_and_a_megabyte_survive(pool):
    said = "naïve ∑ 𝔘 \u2028 \x00 \ud800"
    when = datetime.date(2026, 12, 1)
    results = pool.score([
        item("echo", said, extra_info={"said": said}),
        item("echo", "2026-12-01", extra_info={"said": when}),
        item("echo", "x" * 2**20, extra_info={"said": "x" * 2**20}),
        item("1" + " " * 2**20),
    ])  # fmt: skip
    assert [r.score for r in results] == [1.0] * 4


def test_noise_reaches_stderr_only(hostile):
    code = (
        "from common.rewards import RewardPool\n"
        f"with RewardPool({hostile + ':fn'!r}, 1, 5.0) as pool:\n"
        "    items = [dict(data_source='', answer='1', ground_truth='', extra_info={})]\n"
        "    print(pool.score(items)[0].score)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True)
    assert done.stdout == "1.0\n"
    assert "noise on stdout" in done.stderr
    assert "raw noise on fd 1" in done.stderr


def test_verl_signature(hostile):
    with RewardPool(f"{hostile}:compute_score", 1, 5.0) as pool:
        assert pool.score([item("answer", "truth", "source", {"k": 1})])[0].score == 1.0


def test_order_and_workers_share(hostile):
    with RewardPool(f"{hostile}:slow", 4, 5.0) as pool:
        start = time.monotonic()
        assert [r.score for r in pool.score([item(str(i)) for i in range(12)])] == list(range(12))
        assert time.monotonic() - start < 2.0  # 0.6 s; one after the other 2.4 s


def test_auto_in_the_pool():
    with RewardPool("auto", 2, 10.0) as pool:
        results = pool.score([
            item(r"\boxed{0.5}", r"\frac{1}{2}", "lighteval/MATH"),
            item("#### 42" + " x" * 2**19, "42", "openai/gsm8k"),
            item("9" * 2**20, "42", "openai/gsm8k"),
            item("", "", "mine"),
            item("word " * 2**17 + r"\boxed{2}", "2", "math"),
            item("#### 1", "none", "openai/gsm8k"),
        ])  # fmt: skip
    assert [r.score for r in results] == [1, 1, 0, 1, 1, 0]
    assert results[1].metrics == {"flexible": 1.0}
    assert [bool(r.error) for r in results] == [False] * 5 + [True]


def test_throughput():
    with RewardPool("gsm8k", 4, 5.0) as pool:
        start = time.monotonic()
        results = pool.score([item(f"#### {i}", str(i)) for i in range(512)])
        assert time.monotonic() - start < 3.0  # 0.03 s on 2 idle cores
    assert all(r.score == 1.0 for r in results)


@pytest.mark.parametrize(
    ("source", "name", "error"),
    [
        (None, "fn", "no file "),
        ("1 / 0", "fn", "ZeroDivisionError: division by zero"),
        ("def f(:", "fn", "SyntaxError: "),
        ("import sys; sys.exit(2)", "fn", "SystemExit: 2"),
        ("import os; os._exit(4)", "fn", "died with exit code 4"),
        ("import no_such_module", "fn", "No module named 'no_such_module'"),
        ("def other(): pass", "fn", "has no function 'fn'"),
        ("fn = 3", "fn", "3 is not a callable object"),
    ],
)
def test_a_reward_file_that_cannot_be_used(tmp_path, source, name, error):
    path = tmp_path / "bad.py"
    if source is not None:
        path.write_text(source)
    with pytest.raises(ValueError, match="bad.py:fn: ") as caught:
        RewardPool(f"{path}:{name}", 2, 1.0)
    assert error in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bad_arguments():
    with pytest.raises(
        ValueError, match="choose one of auto, gsm8k, gsm8k_flexible, math, exact, or path/to/file.py:name"
    ):
        RewardPool("gsm9k", 1, 1.0)
    for workers, timeout_s in ((0, 1.0), (1, 0.0), (1, float("nan"))):
        with pytest.raises(ValueError, match="--reward.workers must be >= 1 and --reward.timeout > 0 s"):
            RewardPool("exact", workers, timeout_s)


def test_a_reward_file_may_import_neighbours_and_the_rules(tmp_path):
    (tmp_path / "data.py").write_text("BONUS = 0.5")  # not common/data.py
    (tmp_path / "mine.py").write_text(
        "from common.rewards import gsm8k\nfrom data import BONUS\n"
        "def fn(answer, ground_truth, extra_info): return gsm8k(answer, ground_truth, extra_info)['score'] + BONUS\n"
    )
    with RewardPool(f"{tmp_path / 'mine.py'}:fn", 1, 10.0) as pool:
        assert pool.score([item("#### 1", "1")])[0].score == 1.5


def test_a_slow_import_is_not_charged_to_an_answer(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import os, time\ntime.sleep(1)\n"
        "def fn(answer, ground_truth, extra_info): return float(answer) if answer else os._exit(1)\n"
    )
    with RewardPool(f"{tmp_path / 'slow.py'}:fn", 1, 0.5) as pool:
        assert [r.error is None for r in pool.score([item(""), item("1")])] == [False, True]


# ---- ends ----


def gone(pids: list[int], within_s: float) -> bool:
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes):
            return True
        time.sleep(0.05)
    return False


def family(pool: RewardPool) -> list[int]:
    helper = psutil.Process(pool._helper.pid)
    return [helper.pid, *(child.pid for child in helper.children(recursive=True))]


def test_close(hostile):
    pool = RewardPool(f"{hostile}:fn", 3, 5.0)
    pids = family(pool)
    assert len(pids) == 4
    pool.close()
    pool.close()
    assert gone(pids, 5.0)
    with pytest.raises(RuntimeError, match="the reward pool is closed"):
        pool.score([item("1")])


@pytest.mark.parametrize("idle", [True, False])
def test_the_helper_dies(hostile, idle):
    pool = RewardPool(f"{hostile}:fn", 2, 60.0)
    pids = family(pool)
    kill = f"sleep {0 if idle else 0.5}; kill -9 {pids[0]}"
    with subprocess.Popen(["sh", "-c", kill]) as killer:
        if idle:
            killer.wait()
        with pytest.raises(RuntimeError, match="the reward helper died"):
            pool.score([item("loop"), item("hold the GIL"), item("1")])
    assert gone(pids, 5.0)  # the hung workers too


def test_a_worker_killed_while_free_is_replaced(hostile):
    with RewardPool(f"{hostile}:fn", 1, 5.0) as pool:
        (worker,) = family(pool)[1:]
        os.kill(worker, signal.SIGKILL)
        time.sleep(0.3)
        assert pool.score([item("1")])[0].error is None
        assert family(pool)[1:] != [worker]


PARENT = """
import json, os, sys, time
from common.rewards import RewardPool
import psutil

if __name__ == "__main__":
    pool = RewardPool(sys.argv[1], 3, 3600.0)
    if sys.argv[2] == "forked":  # holds a copy of the pool's socket, as a forked engine would
        if os.fork() == 0:
            time.sleep(30)
            os._exit(0)
    helper = psutil.Process(pool._helper.pid)
    print(json.dumps([p.pid for p in (helper, *helper.children())]), flush=True)
    answers = ["hold the GIL", "loop", "1"] if sys.argv[2] != "idle" else []
    pool.score([dict(data_source="", answer=a, ground_truth="", extra_info={}) for a in answers])
    time.sleep(3600)
"""


@pytest.mark.parametrize("state", ["idle", "hung", "forked"])
def test_the_parent_is_killed(hostile, tmp_path, state):
    (tmp_path / "parent.py").write_text(PARENT)
    command = [sys.executable, str(tmp_path / "parent.py"), f"{hostile}:fn", state]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(REPO)})
    assert parent.stdout
    try:
        pids = json.loads(parent.stdout.readline())
        assert len(pids) == 4
        time.sleep(0.5)
        children = [child.pid for child in psutil.Process(parent.pid).children() if child.pid not in pids]
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    assert gone(pids, 5.0)
    for child in children:
        os.kill(child, signal.SIGKILL)
