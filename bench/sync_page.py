"""Makes docs/many-ranks-measured.md from bench/results/sync.json: no figure of that page is typed but the paper's.

    python -m bench.sync_page

The hazard is a page older than its result; a test compares the two.
"""

import json
import statistics
from pathlib import Path

from bench.sync_ranks import WAYS

__all__ = ["page"]

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "many-ranks-measured.md"
RESULT = ROOT / "bench" / "results" / "sync.json"
ABLATION = tuple(way.label for way in WAYS if not way.computes)
PAPER_S = {"native, per step": 1850, "native, coalesced": 1388, "reweight, coalesced": 1023}

HEAD = """# Many ranks, measured

Made by `python -m bench.sync_page` from [sync.json](../bench/results/sync.json); do not edit.

`{command}`

(Each needs root, for the namespaces; of two that name a cell the later one holds.)

{short}

One machine of 2 cores; ranks in network namespaces on links of a set rate, gloo, float32, one sample a forward,
T = 10 steps, all trained, as in the paper's ablation (arXiv 2609.03528). Forward and backward are sleeps of a
measured time: that of a FLUX transformer of 9.2 M parameters, made so much longer that a forward without gradient
takes {forward:.0f} ms. Decoding and the reward sleep as long as {reward:.0f} such forwards. Schedules, gradients and
messages are the library's own; a full gradient has a sixteenth of the model's elements, a LoRA gradient all of its
own. The rate is set so that one reduction alone (each rank sends every owner its shard) takes what is written, in
forwards F. The *law* (`bench/sync_law.py`) is the time that follows from these seconds alone; it is given what a
reduction took, and knows nothing of what a message costs besides its bytes. No GPU figure is here because none was
measured.

Ways to reduce:

- *all-reduced*: after every trained step's backward each rank sums and spreads, and waits: plain data parallelism
  without overlap. Twice the bytes of a reduction.
- *per step*: after every trained step's backward each rank sends the owners their shards, and waits.
- *during backward*: each block's gradient leaves when it is made; all-reduced this is what DDP does, sharded FSDP2.
- *coalesced*: gradients are added up locally and reduced once, when the advantages are known.
- *late*: a sample's gradient leaves during its last backward; the owners weight it when the advantages are known.

All but all-reduced ways step shards (ZeRO-1) and publish parameters behind the next iteration's first forward.

*step* is an iteration in ms, the slowest rank's, median over interleaved repeats; *blocked* what of it waited for
gradients, *published* for parameters, *gathered* what gathering the rewards took, waiting for slower ranks included;
beside them the law's.
"""
TARGETS = """## Targets

Times faster, and what late is blocked of what coalesced is. A target is met when the 95 % interval reaches it.
*by the law from*: how long one reduction must take for the law to reach the target. "Native, per step" is done in
four ways, since trainers differ in what they send after a step and in whether they wait for it; all have the target.
"""


def page(result=RESULT):
    """The whole page."""
    report = json.loads(result.read_text())
    cases = list(report["cases"].values())
    problem = cases[0]["problem"]
    head = HEAD.format(
        command=report["command"].replace("; ", "`\n`"),
        short=_in_short(cases[0]),
        forward=1e3 * problem["forward_s"],
        reward=problem["reward_s"] / problem["forward_s"],
    )
    figures = [*map(_ablation, cases), "## All figures\n", *map(_cell, cases)]
    return "\n".join(part for part in [head, _claims(cases), _paper_native(cases[0]), *figures] if part)


def _in_short(case):
    """The one sentence for who reads no further."""
    told = []
    for label in ("reweight, late", "reweight, coalesced", "native, per step, all-reduced"):
        step, blocked = (1e3 * statistics.median(case["seconds"][label][key]) for key in ("step", "blocked"))
        told.append(f"*{label}* {step:.0f} ms, of it {blocked:.1f} blocked for gradients")
    return f"In short, an iteration of **{case['name']}** takes:\n" + ";\n".join(told) + "."


def _claims(cases):
    rows = [
        TARGETS,
        *("| link | what | measured | law | target | met | by the law from |", "|---|---|---|---|---|---|---|"),
    ]
    for case in cases:
        for claim in case["claims"]:
            interval = f"{claim['value']:.3f} [{claim['low']:.3f}, {claim['high']:.3f}]"
            law = f"{claim['law']:.3f}" if "law" in claim else "0"
            target, met = "", ""
            if claim["target"] is not None:
                target, met = f"{claim['target']:.2f}", "yes" if claim["met"] else "**no**"
            reached = f"{claim['from_rho']:.2f} F" if claim.get("from_rho") else ""
            rows.append(f"| {case['name']} | {claim['what']} | {interval} | {law} | {target} | {met} | {reached} |")
    return "\n".join(rows) + "\n"


def _paper_native(case):
    """Which of our native ways gains from coalescing as much as the paper's does."""
    steps = {label: statistics.median(case["seconds"][label]["step"]) for label in ABLATION}
    gains = {label: steps[label] / steps["native, coalesced"] for label in ABLATION if "per step" in label}
    paper = PAPER_S["native, per step"] / PAPER_S["native, coalesced"]
    nearest = min(gains, key=lambda label: abs(gains[label] - paper))
    listed = ", ".join(
        f"{gain:.2f} ({label.removeprefix('native, per step').strip(', ') or 'per step'})"
        for label, gain in gains.items()
    )
    return (
        f"Which of the four is the paper's native? There coalescing made native {paper:.2f} times faster.\n"
        f"Here: {listed}.\n"
        f"The nearest is *{nearest}*: reweight with late reduction is {steps[nearest] / steps['reweight, late']:.2f} "
        "times faster than it.\n"
    )


def _ablation(case):
    if not set(ABLATION) <= set(case["seconds"]):
        return ""
    steps = {label: statistics.median(case["seconds"][label]["step"]) for label in ABLATION}
    laws = {label: case["law_s"][label]["step"] for label in ABLATION}
    over = [label for label in ABLATION if case["seconds"][label] and label.startswith("native")]
    rows = [
        f"## Ablation, {case['name']}\n",
        "How many times faster than each native way, measured (law); the paper's from its seconds with 8 ranks.\n",
        "| way | step, ms | "
        + " | ".join("over " + label for label in over)
        + " | paper, over per step | over coalesced |",
        "|---" * (len(over) + 4) + "|",
    ]
    for label in ABLATION:
        ratios = [f"{steps[o] / steps[label]:.2f} ({laws[o] / laws[label]:.2f})" for o in over]
        paper = [
            f"{PAPER_S[o] / PAPER_S[label]:.2f}" if label in PAPER_S else ""
            for o in ("native, per step", "native, coalesced")
        ]
        rows.append(f"| {label} | {1e3 * steps[label]:.0f} | {' | '.join([*ratios, *paper])} |")
    return "\n".join(rows) + "\n"


def _cell(case):
    problem = case["problem"]
    rows = [
        f"**{case['name']}**: forward {1e3 * problem['forward_s']:.0f} ms, with gradient "
        f"{1e3 * problem['traced_s']:.0f}, its backward {1e3 * problem['backward_s']:.0f}; a reduction alone "
        f"{1e3 * case['reduction_s']:.1f} ms at {case['bits_per_s'] / 1e6:.0f} Mbit/s; {case['repeats']} repeats\n",
        "| way | step | law | blocked | law | published | law | gathered |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for label, by_key in case["seconds"].items():
        medians = {key: 1e3 * statistics.median(values) for key, values in by_key.items()}
        laws = {key: 1e3 * value for key, value in case["law_s"][label].items()}
        values = [medians["step"], laws["step"], medians["blocked"], laws["blocked"], medians["published"]]
        values += [laws["published"], medians["gathered"]]
        rows.append(f"| {label} | " + " | ".join(f"{value:.1f}" for value in values) + " |")
    return "\n".join(rows) + "\n"


def main():
    PAGE.write_text(page())
    print(f"written to {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
