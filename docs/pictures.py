"""Draw the README's pictures again: python docs/pictures.py"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt  # noqa: E402

import moegen as mg  # noqa: E402

IMG = Path(__file__).parent / "img"


def main() -> None:
    model = mg.ModelSpec.from_pretrained("mixtral-8x7b")
    cost = mg.CostModel.roofline(mg.HardwareSpec.from_name("c2"))
    s = mg.Strategy(B=3640, b_a=256, b_e=8192, s_expert=8 * model.expert_bytes, omega=0.6)
    graph = mg.build(model, s, phase="decode", kv_len=640)
    ax = mg.simulate(graph, cost).plot(layers=(10, 11))
    IMG.mkdir(exist_ok=True)
    ax.figure.savefig(IMG / "decode_step.png", dpi=110, metadata={"Software": None})
    plt.close(ax.figure)


if __name__ == "__main__":
    main()
