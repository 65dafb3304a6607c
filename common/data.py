"""Prompts from parquet files in verl's layout, and the order in which training sees them.

Callers: every top-level script. A row has the columns data_source (str), prompt (list of {role, content}), reward_model
({style, ground_truth}) and optionally extra_info (any struct); others, such as ability, are not read.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerBase

REQUIRED_COLUMNS = ("data_source", "prompt", "reward_model")


@dataclass(slots=True)
class Prompt:
    """One row, templated and tokenised once: from here on only `ids` travels."""

    ids: list[int]
    """token ids, generation prompt included"""
    text: str
    """`ids` decoded with special tokens, for logs only"""
    data_source: str
    ground_truth: str
    extra_info: dict[str, Any]
    index: int
    """number of the row, from 0, counted over all files in order, dropped rows included"""


def load_prompts(
    files: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    overlong: Literal["filter", "truncate", "error"] = "error",
    limit: int | None = None,
    chat_kwargs: dict[str, Any] | None = None,
) -> tuple[list[Prompt], int]:
    """Reads the first `limit` rows (None: all) of the files in order. Returns (prompts, number of rows dropped).

    A prompt over `max_length` tokens is an error, is dropped ("filter"), or loses tokens on its left ("truncate"), so
    that the generation prompt stays. chat_kwargs go to the chat template, such as {"enable_thinking": False}.

    Raises FileNotFoundError for a missing file. Raises ValueError, naming file, row and column, for a file that is not
    parquet, has no rows or lacks a column, for a malformed row and for a prompt that is too long; and for a tokenizer
    without a chat template and when no prompt is left.
    """
    if max_length < 1:
        raise ValueError(f"--data.max-prompt-length must be at least 1 token, got {max_length}")
    if not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template: take an instruct model, or set "
            "chat_template in its tokenizer_config.json"
        )
    prompts: list[Prompt] = []
    dropped = 0
    for index, (where, row) in enumerate(_rows(files, limit)):
        _check_row(where, row)
        messages = [{"role": message["role"], "content": message["content"]} for message in row["prompt"]]
        try:
            # Straight to ids: a templated string that is tokenised again gets a second BOS.
            ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False, **(chat_kwargs or {})
            )
        except Exception as error:
            raise ValueError(f"{where}, column prompt: the chat template fails: {error}") from error
        if len(ids) > max_length:
            if overlong == "error":
                raise ValueError(
                    f"{where}, column prompt: {len(ids)} tokens are more than --data.max-prompt-length {max_length}: "
                    "raise it, or choose --data.overlong filter or truncate"
                )
            if overlong == "filter":
                dropped += 1
                continue
            ids = ids[-max_length:]
        truth = str(row["reward_model"]["ground_truth"])
        extra_info = row.get("extra_info") or {}
        prompts.append(Prompt(ids, tokenizer.decode(ids), row["data_source"], truth, extra_info, index))
    if not prompts:
        raise ValueError(
            f"no prompt is left of {', '.join(files) or 'no files'}: {dropped} were dropped for having more than "
            f"--data.max-prompt-length {max_length} tokens"
        )
    return prompts, dropped


def _rows(files: Sequence[str], limit: int | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields ("file, row n", row), n from 0 in each file, at most `limit` times; reads no further than that."""
    left = float("inf") if limit is None else limit
    for file in files:
        if not Path(file).is_file():
            raise FileNotFoundError(f"no file {file}: check the path, or write it with a script of launch/")
        try:
            with pq.ParquetFile(file) as parquet:
                names = parquet.schema_arrow.names
                missing = [column for column in REQUIRED_COLUMNS if column not in names]
                if missing:
                    raise ValueError(f"{file} lacks the column {', '.join(missing)}; it has {', '.join(names)}")
                if parquet.metadata.num_rows == 0:
                    raise ValueError(f"{file} has no rows")
                columns = [*REQUIRED_COLUMNS, *(["extra_info"] if "extra_info" in names else [])]
                number = 0
                for batch in parquet.iter_batches(columns=columns):
                    for row in batch.to_pylist():
                        if left <= 0:
                            return
                        yield f"{file}, row {number}", row
                        number += 1
                        left -= 1
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{file} is not a parquet file, or is damaged: {error}") from error


def _check_row(where: str, row: dict[str, Any]) -> None:
    def check(sound: bool, column: str, wanted: str) -> None:
        if not sound:
            raise ValueError(f"{where}, column {column}: must be {wanted}, got {repr(row[column])[:200]}")

    def is_message(entry: object) -> bool:
        return isinstance(entry, dict) and all(isinstance(entry.get(key), str) for key in ("role", "content"))

    prompt, reward_model = row["prompt"], row["reward_model"]
    check(isinstance(prompt, list) and bool(prompt), "prompt", "a list of at least one {role, content}")
    check(all(map(is_message, prompt)), "prompt", "a list of {role, content}, both text")
    check(isinstance(row["data_source"], str), "data_source", "text")
    truth = reward_model.get("ground_truth") if isinstance(reward_model, dict) else None
    check(isinstance(truth, str | int | float), "reward_model", "a struct whose ground_truth is text or a number")
    check(isinstance(row.get("extra_info"), dict | None), "extra_info", "a struct or null")


class Sampler:
    """An endless stream of indices in [0, size), in batches that straddle the ends of epochs: none is lost or repeated.

    Its whole state is `position`, the number of indices given so far; a run may resume with another batch_size. Raises
    ValueError unless 1 <= batch_size <= size.
    """

    def __init__(self, size: int, batch_size: int, seed: int, shuffle: bool = True) -> None:
        if not 1 <= batch_size <= size:
            raise ValueError(f"--batch.prompts must be 1 to {size}, the number of prompts, got {batch_size}")
        self.size, self.batch_size, self.seed, self.shuffle = size, batch_size, seed, shuffle
        self.position = 0

    @property
    def epoch(self) -> int:
        """Number of epochs given in full, which is the epoch, from 0, of the next index."""
        return self.position // self.size

    def next_batch(self) -> list[int]:
        """The next batch_size indices. One can occur twice only across an epoch's end."""
        batch: list[int] = []
        while len(batch) < self.batch_size:
            epoch, start = divmod(self.position, self.size)
            order = permutation(self.size, self.seed, epoch) if self.shuffle else range(self.size)
            taken = order[start : start + self.batch_size - len(batch)]
            batch.extend(taken)
            self.position += len(taken)
        return batch

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position, "size": self.size, "seed": self.seed, "shuffle": self.shuffle}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues from a `state_dict`. Raises ValueError if that one counted over another order of prompts."""
        for name in ("size", "seed", "shuffle"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"the checkpoint's sampler has {name} {state[name]}, this run has {getattr(self, name)}: resume "
                    "with the same data files, data flags and seed, or start a new run"
                )
        self.position = state["position"]


@lru_cache(maxsize=2)  # a batch touches two epochs at most
def permutation(size: int, seed: int, epoch: int) -> tuple[int, ...]:
    """The order of epoch `epoch`, a pure function of its arguments."""
    # Sorted by random(), the one method whose values Python promises to keep: a later Python resumes in the same order.
    rng = random.Random(f"{seed}/{epoch}")
    keys = [rng.random() for _ in range(size)]
    return tuple(sorted(range(size), key=keys.__getitem__))
