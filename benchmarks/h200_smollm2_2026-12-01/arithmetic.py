"""Arithmetic asked in words, in verl's schema: python benchmarks/h200_smollm2_2026-12-01/arithmetic.py OUT add|mul

add: a and b from 10 to 99; 7,108 training questions, 992 held out.
mul: a from 2 to 12, b from 2 to 30; 245 training questions, 74 held out.
A pair of operands goes whole, in both orders, to one split.
"""

import os
import random
import sys

import pyarrow as pa
import pyarrow.parquet as pq

ASK = "What is {a} {op} {b}? Let's think step by step and give the final answer after ####."


def main(out: str, task: str) -> None:
    op, fn, xs, ys, held = {
        "add": ("+", lambda a, b: a + b, range(10, 100), range(10, 100), 500),
        "mul": ("*", lambda a, b: a * b, range(2, 13), range(2, 31), 60),
    }[task]
    pairs = sorted({(min(a, b), max(a, b)) for a in xs for b in ys})
    random.Random(0).shuffle(pairs)
    os.makedirs(out, exist_ok=True)
    for split, chosen in (("test", set(pairs[:held])), ("train", set(pairs[held:]))):
        questions = [(a, b) for a in xs for b in ys if (min(a, b), max(a, b)) in chosen]
        rows = [
            {
                "data_source": f"arithmetic/{task}",
                "prompt": [{"role": "user", "content": ASK.format(a=a, op=op, b=b)}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(fn(a, b))},
                "extra_info": {"split": split, "index": i},
            }
            for i, (a, b) in enumerate(questions)
        ]
        pq.write_table(pa.Table.from_pylist(rows), f"{out}/{split}.parquet")
        print(split, len(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
