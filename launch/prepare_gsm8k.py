"""GSM8K as parquet files in verl's schema: python launch/prepare_gsm8k.py OUT

OUT/train.parquet (7,473 rows) and OUT/test.parquet (1,319) are for --data.train and --data.val. They come from the hub's
openai/gsm8k, or, where there is no network, from a folder: a copy of that data set (main/train-*.parquet), or the files of
github.com/openai/grade-school-math (train.jsonl, test.jsonl).
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

SPLITS = ("train", "test")
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'  # verl's, word for word


def from_hub(name: str) -> Path:
    """The folder of a snapshot; the hub's cache serves a second call."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, repo_type="dataset", allow_patterns=["main/*.parquet"]))
    except Exception as e:
        reason = str(e).strip().splitlines() or [type(e).__name__]
        raise OSError(f"{name} is not to be had from the hub ({reason[0]}): with a copy of it, use --local FOLDER") from e


def read_split(folder: Path, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields ("file, row n", row), n from 0."""
    parquets = sorted((folder / "main").glob(f"{split}-*.parquet")) or sorted(folder.glob(f"{split}-*.parquet"))
    jsonl = folder / f"{split}.jsonl"
    if not parquets and not jsonl.is_file():
        raise FileNotFoundError(f"{folder} holds neither main/{split}-*.parquet nor {split}.jsonl")
    for path in parquets:
        try:
            rows = pq.read_table(path).to_pylist()
        except (pa.ArrowException, OSError) as e:
            raise ValueError(f"{path} is not a parquet file, or is damaged: {str(e).splitlines()[0]}") from e
        yield from ((f"{path}, row {i}", row) for i, row in enumerate(rows))
    for i, line in enumerate([] if parquets else jsonl.read_text(encoding="utf-8").splitlines()):
        try:
            yield f"{jsonl}, row {i}", json.loads(line)
        except json.JSONDecodeError as e:
            raise ValueError(f"{jsonl}, row {i} is not JSON: {e}") from e


def convert(where: str, row: Any, split: str, index: int) -> dict[str, Any]:
    question, answer = (row.get(name) if isinstance(row, dict) else None for name in ("question", "answer"))
    if not isinstance(question, str) or not isinstance(answer, str):
        raise ValueError(f"{where}: question and answer must be text")
    truth = re.search(r"####\s*(-?[0-9.,]*[0-9])", answer)
    if truth is None:
        raise ValueError(f"{where}: the answer has no number after ####")
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth[1].replace(",", "")},
        "extra_info": {"split": split, "index": index, "question": question, "answer": answer},
    }


def main(out: Path, local: Path | None, name: str) -> None:
    """Raises ValueError or OSError, in one line, before the first file is written."""
    if local is not None and not local.is_dir():
        raise FileNotFoundError(f"--local {local}: no such folder")
    folder = local or from_hub(name)
    tables = {}
    for split in SPLITS:
        rows = [convert(where, row, split, i) for i, (where, row) in enumerate(read_split(folder, split))]
        if not rows:
            raise ValueError(f"the {split} split in {folder} has no rows")
        tables[split] = pa.Table.from_pylist(rows)
    out.mkdir(parents=True, exist_ok=True)
    for split, table in tables.items():
        pq.write_table(table, out / f"{split}.parquet.partial")
        os.replace(out / f"{split}.parquet.partial", out / f"{split}.parquet")
        print(f"{out / split}.parquet: {table.num_rows:,} rows")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write: train.parquet, test.parquet")
    parser.add_argument("--local", type=Path, help="read from this folder, not from the hub")
    parser.add_argument("--name", default="openai/gsm8k", help="of the data set on the hub (default: %(default)s)")
    try:
        main(**vars(parser.parse_args()))
    except (ValueError, OSError) as e:
        sys.exit(f"error: {e}")
