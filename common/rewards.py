"""Rewards: rules for GSM8K and MATH, or a user's function, applied to answers by processes that can be killed.

Callers: every top-level script. A reward function `fn(answer: str, ground_truth: str, extra_info: dict)` returns a
number, or a dict: its key "score" is the reward, its other finite numbers become metrics. One with verl's parameters,
`compute_score(data_source, solution_str, ground_truth, extra_info)`, is called as verl calls it.

A degenerate answer can hang a parser for ever, in C too, where only SIGKILL helps; and a fork or spawn of the training
process would take CUDA, the engine or the main script along. So scoring runs beside it:
    script --Popen--> helper: this file, standard library only, one thread, so that it may fork at any time
    helper --fork---> workers: the reward function in the main thread, one answer at a time
"""

import atexit
import importlib.util
import inspect
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from decimal import Decimal
from math import isfinite
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, SupportsFloat

NUMBER = r"(?:(?<!\w)-\$?|\$-?)?(?:[0-9][0-9,]*(?:\.[0-9]*)?|\.[0-9]+)"  # the minus in "10-5" is not a sign
VERL_PARAMETERS = ["data_source", "solution_str", "ground_truth", "extra_info"]
LOAD_LIMIT_S = 300.0  # for importing a reward function, which may import torch
LOADING = -1

Outcome = tuple[float, dict[str, float], str | None]  # the fields of Reward


def gsm8k(answer: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, float]:
    """score: 1.0 if the last "#### number" is the truth (verl's strict rule sees only the last 300 characters; this one
    sees all). flexible: 1.0 if the last number of any form is. Raises ValueError if the truth is not a number."""

    def last(pattern: str, text: str) -> Decimal | None:  # Decimal: 42 == 42.0 == "42.", and long integers stay exact
        found = re.findall(pattern, text)
        return Decimal(re.sub("[$,]", "", found[-1])) if found else None

    gold = last(NUMBER, ground_truth)
    if gold is None:
        raise ValueError(f"GSM8K needs a number as ground truth, got {ground_truth!r}")
    strict = last(rf"####[ \t]*({NUMBER})", answer)
    return {"score": float(strict == gold), "flexible": float(last(NUMBER, answer) == gold)}


def gsm8k_flexible(answer: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, float]:
    """`gsm8k` with its flexible rule as the score and its strict one as the metric `strict`."""
    scores = gsm8k(answer, ground_truth, extra_info)
    return {"score": scores["flexible"], "strict": scores["score"]}


def math(answer: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """1.0 if math-verify finds the answer equal to the truth. Raises ValueError if it cannot parse the truth."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits (SIGALRM) are off
    gold = parse(ground_truth if "\\boxed" in ground_truth else f"\\boxed{{{ground_truth}}}", parsing_timeout=None)
    if not gold:
        raise ValueError(f"math-verify cannot parse the ground truth {ground_truth!r}")
    # math-verify joins neighbouring boxes into a set: one that ends the reasoning would spoil the one that answers.
    final = answer.rpartition("</think>")[2]
    return float(verify(gold, parse(final, parsing_timeout=None), timeout_seconds=None))


def exact(answer: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """1.0 if answer and truth are the same text but for white space around it."""
    return float(answer.strip() == ground_truth.strip())


def auto(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float | dict:
    """The rule for the data source: gsm8k for openai/gsm8k, math for lighteval/MATH, MATH-500 or aime24, else exact."""
    source = data_source.lower()
    rule = gsm8k if "gsm8k" in source else math if "math" in source or source.startswith("aime") else exact
    return rule(solution_str, ground_truth, extra_info)


RULES: dict[str, Callable[..., Any]] = {rule.__name__: rule for rule in (auto, gsm8k, gsm8k_flexible, math, exact)}


def overlong_penalty(length: int, max_length: int, buffer: int, factor: float = 1.0) -> float:
    """DAPO's soft punishment (Yu et al. 2025, eq. 13), added to the score: 0 up to max_length - buffer tokens, then
    linear to -factor at max_length, -factor beyond. Raises ValueError unless 0 < buffer <= max_length."""
    if not 0 < buffer <= max_length:
        raise ValueError(f"the overlong buffer must be 1 to {max_length} (max_length) tokens, got {buffer}")
    return -factor * min(1.0, max(0.0, (length - max_length + buffer) / buffer))


def load_reward(name: str) -> Callable[[Mapping[str, Any]], Any]:
    """The function behind `--reward.fn name`, as a function of an item of `RewardPool.score`. Raises ValueError for an
    unknown name, a missing file or a missing function, and what importing the file raises."""
    if name in ("auto", "math"):
        import math_verify  # noqa: F401  that it is missing is found here, once, and not at each answer
    fn = RULES.get(name)
    if fn is None:
        file, _, attribute = name.rpartition(":")
        if not file.endswith(".py"):
            raise ValueError(f"choose one of {', '.join(RULES)}, or path/to/file.py:name")
        if not Path(file).is_file():
            raise ValueError(f"no file {file} in {os.getcwd()}")
        # The file may import its neighbours, as a script may, and this repository: `from common.rewards import gsm8k`.
        sys.path[:0] = [str(Path(file).resolve().parent), str(Path(__file__).resolve().parents[1])]
        spec = importlib.util.spec_from_file_location("reward_file", file)
        assert spec and spec.loader  # as for any .py
        module = sys.modules["reward_file"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if not hasattr(module, attribute):
            raise ValueError(f"{file} has no function {attribute!r}")
        fn = getattr(module, attribute)
    if list(inspect.signature(fn).parameters) == VERL_PARAMETERS:
        return lambda i: fn(i["data_source"], i["answer"], i["ground_truth"], i["extra_info"])
    return lambda i: fn(i["answer"], i["ground_truth"], i["extra_info"])


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:500]


def _outcome(fn: Callable[[Mapping[str, Any]], Any], item: Mapping[str, Any]) -> Outcome:
    try:
        value = fn(item)
        named = value if isinstance(value, Mapping) else {"score": value}
        # SupportsFloat: bool, int, float, numpy and torch scalars; not None, not a string.
        numbers = {str(k): float(v) for k, v in named.items() if isinstance(v, SupportsFloat) and isfinite(v)}
        if "score" not in numbers:
            raise ValueError(f"a reward is a finite number or a dict with one as 'score', got {value!r}")
        return numbers.pop("score"), numbers, None
    except BaseException as error:  # sys.exit() too costs one answer
        return 0.0, {}, _first_line(error)


def _work(name: str, helper: Connection, inherited: Sequence[Connection]) -> None:
    """A worker's life: its first outcome tells whether the function was loaded, each later one is an item's."""
    for connection in inherited:  # a copy left open here would hide the helper's end from the others
        connection.close()
    sys.stdout = sys.stderr  # the same file (see Popen), but flushed at each line
    with suppress(EOFError, ConnectionError):  # the helper is gone
        try:
            fn = load_reward(name)
        except BaseException as error:  # sys.exit() too
            return helper.send((0.0, {}, _first_line(error)))
        helper.send((0.0, {}, None))
        while True:
            helper.send(_outcome(fn, helper.recv()))


@dataclass(slots=True)
class _Worker:
    process: ForkProcess
    connection: Connection
    deadline: float  # of its task, on time.monotonic()
    task: int | None = LOADING  # index of the answer in its hands; None: free

    def end(self) -> int | None:
        """Kills what is left of it. Returns the exit code: its own if it ended by itself; -N for signal N."""
        self.process.kill()
        self.process.join()
        self.connection.close()
        return self.process.exitcode


def _serve(parent: Connection, name: str, size: int, timeout_s: float) -> None:
    """The helper: replies (None, outcomes) to a batch of items once a worker has loaded the function; (text, None) if
    it cannot be loaded, and exits. Raises EOFError or ConnectionError when the parent is gone."""
    if name in ("auto", "math"):
        with suppress(ImportError):  # the worker reports it
            import math_verify  # noqa: F401  all forks share it: a new worker starts in milliseconds
    parent_pid = os.getppid()
    workers: list[_Worker] = []

    def hire() -> _Worker:
        ours, theirs = Pipe()
        process = ForkProcess(target=_work, args=(name, theirs, [parent, ours, *(w.connection for w in workers)]))
        process.start()
        theirs.close()
        return _Worker(process, ours, time.monotonic() + LOAD_LIMIT_S)

    for _ in range(size):
        workers.append(hire())
    items: Any = None  # the batch in work
    outcomes, waiting = dict[int, Outcome](), iter(range(0))
    while True:
        for worker in workers:
            if worker.task is None and (task := next(waiting, None)) is not None:
                worker.task, worker.deadline = task, time.monotonic() + timeout_s
                with suppress(ConnectionError):  # it died while free, which its connection will tell
                    worker.connection.send(items[task])
        pause_s = min([1.0, *(w.deadline - time.monotonic() for w in workers if w.task is not None)])
        ready = wait([parent, *(w.connection for w in workers)], pause_s)
        if os.getppid() != parent_pid:  # a fork of the parent, such as an engine, may keep its socket open
            raise EOFError
        if parent in ready:
            items, outcomes = json.loads(parent.recv_bytes()), {}
            waiting = iter(range(len(items)))

        for place, worker in enumerate(workers):
            fault = None
            if worker.connection in ready:
                try:
                    outcome = worker.connection.recv()
                except (EOFError, ConnectionError):
                    fault = f"the reward process died with exit code {worker.end()}"
            elif worker.task is not None and time.monotonic() >= worker.deadline:
                worker.end()
                fault = f"no result within {LOAD_LIMIT_S if worker.task == LOADING else timeout_s:g} s"
            else:
                continue
            task, worker.task = worker.task, None
            if fault:
                outcome = (0.0, {}, fault)
                workers[place] = hire()
            if task == LOADING and outcome[2]:
                parent.send((outcome[2], None))
                sys.exit(outcome[2])  # on stderr too: between two batches nobody reads the reply
            if task not in (LOADING, None):
                outcomes[task] = outcome
        if items is not None and len(outcomes) == len(items) and any(w.task is None for w in workers):
            parent.send((None, [outcomes[index] for index in range(len(items))]))
            items = None


@dataclass(slots=True, frozen=True)
class Reward:
    """error: the first line of what went wrong, or None; with an error score is 0.0 and metrics is empty."""

    score: float
    metrics: dict[str, float]
    error: str | None


class RewardPool(AbstractContextManager):
    """Scores answers in `workers` processes, each answer within `timeout_s` seconds of wall clock. A context manager.

    Create it before CUDA and the engine, whose CPU affinity children inherit. fn: auto, gsm8k, gsm8k_flexible, math,
    exact or path/to/file.py:name; what it prints goes to stderr. Raises ValueError if fn cannot be loaded or workers or
    timeout_s is not positive, and RuntimeError if the helper dies.
    """

    def __init__(self, fn: str, workers: int, timeout_s: float) -> None:
        if workers < 1 or not timeout_s > 0:
            raise ValueError(f"--reward.workers must be >= 1 and --reward.timeout > 0 s, got {workers} and {timeout_s}")
        self._fn = fn
        self._connection, theirs = Pipe()  # its own socket: print() in a reward function cannot write to it
        self._helper = subprocess.Popen(
            # -P: else common/ is first on sys.path, and a reward file's `import data` finds ours.
            [sys.executable, "-P", os.path.abspath(__file__), str(theirs.fileno()), fn, str(workers), str(timeout_s)],
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # one signal to the group ends all; Ctrl-C stays the script's to handle
        )
        theirs.close()
        self.score([])  # returns when a worker is ready

    def score(self, items: Sequence[Mapping[str, Any]]) -> list[Reward]:
        """Rewards in the order of items: dicts of data_source, answer, ground_truth (str) and extra_info (dict; values
        that JSON lacks, such as dates, arrive as str). An answer on which fn raises, takes too long, kills its process
        or returns no finite number costs itself only. Raises RuntimeError if the pool is closed or the helper dies."""
        if self._connection.closed:
            raise RuntimeError("the reward pool is closed")
        outcomes = None
        try:
            self._connection.send_bytes(json.dumps(list(items), default=str).encode())
            failed, outcomes = self._connection.recv()
        except (EOFError, ConnectionError) as error:
            raise RuntimeError("the reward helper died: see stderr, or it was killed (out of memory?)") from error
        finally:
            if outcomes is None:  # failed, dead, or interrupted: then the late reply would pass for the next batch's
                self.close()
        if failed:
            raise ValueError(f"--reward.fn {self._fn}: {failed}")
        return [Reward(*outcome) for outcome in outcomes]

    def close(self) -> None:
        """Kills the helper and its workers. May be called again."""
        if not self._connection.closed:
            self._connection.close()
            with suppress(ProcessLookupError):
                os.killpg(self._helper.pid, signal.SIGKILL)
            self._helper.wait()

    def __exit__(self, *_: object) -> None:
        self.close()


if __name__ == "__main__":
    atexit.register(os.killpg, 0, signal.SIGKILL)  # however this ends: hung workers, what they started, and itself
    with suppress(EOFError, ConnectionError):  # the parent is gone
        _serve(Connection(int(sys.argv[1])), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
