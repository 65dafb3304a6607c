"""A run at a glance: python launch/report.py RUN prints a table and writes RUN/curves.png.

Several runs (seeds, a control) are drawn over one another: python launch/report.py RUN RUN2 ... --out curves.png
Reads metrics.jsonl, so it works during a run as well. quickstart.sh calls it at the end.
"""

import argparse
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Row = dict[str, float]

COLUMNS = {  # heading -> metric, format
    "step": ("step", ".0f"),
    "reward": ("reward/mean", ".3f"),
    "held-out": ("val/greedy", ".3f"),
    "KL to ref": ("actor/ref_kl", ".4f"),
    "entropy": ("actor/entropy", ".3f"),
    "length": ("length/response_mean", ".1f"),
    "tok/s": ("perf/tokens_per_s", ",.0f"),
    "s/step": ("time/step", ".2f"),
}
PANELS = {
    "reward/mean": "Training reward",
    "val/greedy": "Held-out accuracy, greedy",
    "actor/ref_kl": "KL to the reference model, nats a token",
    "length/response_mean": "Response length, tokens",
}


def read(run: Path) -> list[Row]:
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    except OSError as e:
        sys.exit(f"report: {e.filename}: {e.strerror}")
    rows = [json.loads(line) for line in lines if line.endswith("\n")]  # a run in progress may have written half a line
    return rows or sys.exit(f"report: {run}/metrics.jsonl holds no step yet")


def spread(rows: list[Row], count: int) -> list[Row]:
    """At most `count` rows at even distances, the first and the last among them."""
    n = min(count, len(rows))
    return [rows[round(i * (len(rows) - 1) / max(n - 1, 1))] for i in range(n)]


def table(rows: list[Row]) -> str:
    """The first training step, the last, and some between: validated ones where there are enough, as they say most."""
    trained = [row for row in rows if "reward/mean" in row]
    validated = [row for row in rows if "val/greedy" in row]
    shown = spread(validated if len(validated) >= 5 else rows, 9) + trained[:1] + rows[-1:]
    lines = ["".join(f"{heading:>11}" for heading in COLUMNS)]
    for row in sorted({row["step"]: row for row in shown}.values(), key=lambda row: row["step"]):
        lines.append("".join(f"{format(row[key], form) if key in row else '-':>11}" for key, form in COLUMNS.values()))
    return "\n".join(lines)


def time_shares(rows: list[Row]) -> str:
    """Each phase's part of all steps' wall time. Validation before training belongs to no step and is left out."""
    steps = [row for row in rows if "time/step" in row]
    total = sum(row["time/step"] for row in steps)
    if not total:
        return "no training step yet"
    seconds: dict[str, float] = {}
    for row in steps:
        for key, value in row.items():
            if key.startswith("time/") and key != "time/step":
                seconds[key[5:]] = seconds.get(key[5:], 0.0) + value
    seconds["other"] = max(total - sum(seconds.values()), 0.0)
    shares = sorted(((value / total, name) for name, value in seconds.items()), reverse=True)
    return f"{total:,.0f} s in {len(steps)} steps: " + ", ".join(f"{name} {share:.0%}" for share, name in shares if share >= 0.005)


def draw(runs: dict[str, list[Row]], out: Path) -> None:
    style = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25, "font.size": 10}
    with plt.rc_context(style):
        figure, axes = plt.subplots(2, 2, figsize=(10, 6.5), sharex=True, layout="constrained")
        for panel, (key, title) in zip(axes.flat, PANELS.items(), strict=True):
            for label, rows in runs.items():
                points = [(row["step"], row[key]) for row in rows if key in row]
                steps, values = zip(*points, strict=True) if points else ((), ())
                panel.plot(steps, values, label=label, linewidth=1.6, marker="o" if len(points) < 30 else "", markersize=4)
            panel.set_title(title, loc="left", fontsize=10)
            if not any(key in row for rows in runs.values() for row in rows):
                panel.text(0.5, 0.5, "not measured", transform=panel.transAxes, ha="center", color="gray")
        for panel in axes[1]:
            panel.set_xlabel("step")
            panel.xaxis.get_major_locator().set_params(integer=True)
        axes[0, 1].set_ylim(0, 1.02)
        if len(runs) > 1:
            axes[0, 0].legend(frameon=False)
        else:
            figure.suptitle(next(iter(runs)), fontweight="bold")
        figure.savefig(out, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, which holds metrics.jsonl")
    parser.add_argument("--out", type=Path, help="the picture; RUN/curves.png if not given, needed with several runs")
    args = parser.parse_args()
    if len(args.runs) > 1 and args.out is None:
        parser.error("several runs need --out")
    out = args.out or args.runs[0] / "curves.png"
    runs = {str(run): read(run) for run in args.runs}
    for name, rows in runs.items():
        print(f"\n{name}\n{table(rows)}\n{time_shares(rows)}")
    draw(runs, out)
    print(f"\ncurves: {out}")


if __name__ == "__main__":
    main()
