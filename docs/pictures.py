"""Draw the pictures of README and docs again: python docs/pictures.py"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("agg")
import pandas as pd  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

import moegen as mg  # noqa: E402
from moegen.sim.bounds import bound  # noqa: E402

IMG = Path(__file__).parent / "img"
MODEL = mg.ModelSpec.from_pretrained("mixtral-8x7b")
COST = mg.CostModel.roofline(mg.HardwareSpec.from_name("c2"))
STRATEGY = mg.Strategy(B=3640, b_a=256, b_e=8192, s_expert=8 * MODEL.expert_bytes, omega=0.55)


def decode_step() -> Axes:
    """Two layers of a decode step."""
    graph = mg.build(MODEL, STRATEGY, phase="decode", kv_len=640)
    return mg.simulate(graph, COST).plot(layers=(10, 11))


def layer_dag() -> Axes:
    """Who waits for whom in a layer."""
    graph = mg.build(MODEL, STRATEGY, phase="decode", kv_len=640)
    return mg.plot.layer_dag(graph, layer=10, cost=COST)


def throughput_vs_omega(points: int = 21) -> pd.DataFrame:
    """Decode throughput as the simulator sees it, and what binds, over ω."""
    rows = []
    for i in range(points):
        s = STRATEGY.with_(omega=i / (points - 1))
        graph = mg.build(MODEL, s, phase="decode", kv_len=640)
        period_s = mg.simulate(graph, COST, steps=3).period_s
        rows.append((s.omega, s.B / period_s, bound(graph, COST).binds))
    return pd.DataFrame(rows, columns=["omega", "decode_tokens_per_s", "binds"])


PICTURES = {
    "decode_step": decode_step,
    "layer_dag": layer_dag,
    "throughput_vs_omega": lambda: mg.plot.throughput(throughput_vs_omega()),
}


def main() -> None:
    IMG.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        draw().figure.savefig(IMG / f"{name}.png", dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main()
