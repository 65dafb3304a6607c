"""The numbers and the picture of docs/ppo_fsdp_vllm.md: python benchmarks/h200_smollm2_2026-12-01/summary.py

Prints a table from the .jsonl files beside it and draws docs/h200_add.png. Early and late are means over steps without validation:
steps 2 to 5, and the last ten.
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent
RUNS = ("add", "add_permuted", "mul", "mul_offload")
PHASES = ("generate", "reward", "old_logprob", "ref_logprob", "values", "advantages", "update_critic", "update_actor", "sync")

Row = dict[str, float]


def read(name: str) -> list[Row]:
    return [json.loads(line) for line in (HERE / f"{name}.jsonl").read_text().splitlines()]


def mean(rows: list[Row], key: str) -> float:
    return sum(row[key] for row in rows) / len(rows)


def extent(rows: list[Row], key: str, form: str, scale: float = 1.0) -> str:
    values = [scale * row[key] for row in rows]
    return f"{format(min(values), form)} to {format(max(values), form)}"


def numbers(rows: list[Row]) -> dict[str, str]:
    steps = [row for row in rows if "time/step" in row]
    plain = [row for row in steps if "val/greedy" not in row]
    early, late = [r for r in plain if 2 <= r["step"] <= 5], [r for r in plain if r["step"] > steps[-1]["step"] - 10]
    held_out = [row["val/greedy"] for row in rows if "val/greedy" in row]
    seconds = sum(row["time/step"] for row in steps)
    return {
        "steps": str(len(steps)),
        "held-out greedy: before, best, last": f"{held_out[0]:.3f}, {max(held_out):.3f}, {held_out[-1]:.3f}",
        "training reward: first, last": f"{steps[0]['reward/mean']:.3f}, {steps[-1]['reward/mean']:.3f}",
        "seconds, all steps": f"{seconds:.0f}",
        "tokens/s, prompts included": f"{sum(r['perf/tokens_per_s'] * r['time/step'] for r in steps) / seconds:,.0f}",
        "MFU of the actor's update, mean": f"{mean(steps, 'perf/mfu_update_actor'):.1%}",
        "MFU of the actor's update, range": extent(steps, "perf/mfu_update_actor", ".1f", 100) + " %",
        "response tokens, early / late": f"{mean(early, 'length/response_mean'):.1f} / {mean(late, 'length/response_mean'):.1f}",
        "share of responses cut, first / last step": f"{steps[0]['length/cut_share']:.2f} / {steps[-1]['length/cut_share']:.2f}",
        'share with the right "#### number", most': f"{max(row['reward/strict'] for row in steps):.3f}",
        "s/step, early / late": f"{mean(early, 'time/step'):.2f} / {mean(late, 'time/step'):.2f}",
        **{f"  {phase}": f"{mean(early, f'time/{phase}'):.3f} / {mean(late, f'time/{phase}'):.3f}" for phase in PHASES},
        "|Δp|, first / last step": f"{steps[0]['actor/prob_diff']:.4f} / {steps[-1]['actor/prob_diff']:.4f}",
        "|Δp|, range": extent(steps, "actor/prob_diff", ".4f"),
        "clipfrac, range": extent(steps, "actor/clipfrac", ".4f"),
        "approx_kl, range": extent(steps, "actor/approx_kl", ".4f"),
        "tis_weight, range": extent(steps, "actor/tis_weight", ".4f"),
        "entropy, first / last step": f"{steps[0]['actor/entropy']:.2f} / {steps[-1]['actor/entropy']:.2f}",
        "explained variance, range": extent(steps, "critic/explained_variance", ".2f"),
        "sync, s": extent(steps, "time/sync", ".2f"),
        "sync, GB/s": extent(steps, "perf/sync_GBps", ".1f"),
        "sync check, nats": extent(steps, "rollout/sync_logprob_diff", ".3f") if "rollout/sync_logprob_diff" in steps[0] else "-",
        "device_peak, GiB": extent(steps, "memory/device_peak_GiB", ".1f"),
        "device_used, GiB": extent(steps, "memory/device_used_GiB", ".1f"),
        "host_peak, GiB": f"{max(row['memory/host_peak_GiB'] for row in steps):.1f}",
    }


def draw(out: Path) -> None:
    style = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25, "font.size": 10}
    panels = {"reward/mean": "Training reward (share of sampled answers that are right)", "val/greedy": "Held-out accuracy, greedy"}
    lines = {"add": ("PPO", "#1f5fa8"), "add_permuted": ("control: rewards permuted within the batch", "#999999")}
    with plt.rc_context(style):
        figure, axes = plt.subplots(1, 2, figsize=(10, 3.4), sharey=True, layout="constrained")
        for panel, (key, title) in zip(axes, panels.items(), strict=True):
            for name, (label, colour) in lines.items():
                steps, values = zip(*[(row["step"], row[key]) for row in read(name) if key in row], strict=True)
                panel.plot(steps, values, label=label, color=colour, linewidth=1.8, marker="o" if key == "val/greedy" else "", markersize=4)
            panel.set_title(title, loc="left", fontsize=10)
            panel.set_xlabel("step")
            panel.set_ylim(0, 1)
        axes[0].legend(frameon=False, loc="center right")
        figure.savefig(out, dpi=130)


if __name__ == "__main__":
    table = {name: numbers(read(name)) for name in RUNS}
    print(f"{'':<44}" + "".join(f"{name:>24}" for name in RUNS))
    for key in table[RUNS[0]]:
        print(f"{key:<44}" + "".join(f"{table[name][key]:>24}" for name in RUNS))
    draw(HERE.parents[1] / "docs" / "h200_add.png")
