"""The whole way from measuring to the report on CPU lanes with tiny models, in under a minute.

    python benchmarks/h200/prediction/stand_in.py RAW RESULTS

For the tests, and for the notebook where nothing has been measured on a GPU. What it finds says
nothing of a GPU.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import design
import measure
from kept import Kept, keep, leaving, of_this_script, require_folder
from made_up import MADE_UP
from predict import predict
from situations import Situation

# Layers, decode and prefill points, and rows at most.
MODELS = {"tiny": (2, 2, 1, 96), "tiny-latent": (2, 2, 1, 96)}
BUDGETS = "--device cpu --gpu-memory 2GiB --host-memory 2GiB --profile-budget-s 12"


def stand_in(raw: Path, folder: Path) -> None:
    """Measure into ``raw``, keep and predict in ``folder``."""
    require_folder(folder, "results go")
    measure.MODELS = MODELS
    for name in MODELS:  # Half as wide numbers take a CPU longer.
        MADE_UP[name] = MADE_UP[name] | {"dtype": "float32"}
    measure.CURVE_ROWS, measure.CURVE_CONTEXT = 32, 200
    small = {"rows": 16, "context": 40, "omega": 0.4, "share": 0.5, "steps": 6, "rounds": 2}
    measure.SITUATIONS = (
        Situation("kept", **small, kept=True, ops=("pre_attn", "attn_cpu")),
        Situation("copied", **small, kept=False, ops=("pre_attn", "copy_expert", "attn_cpu")),
    )
    design.KV_BYTES, design.SLOT_BYTES = 1e7, 1e6
    design.PREFILL_TOKENS, design.PROMPT = (256, 1024), (16, 64)
    stages = [
        ("profile", ""),
        *(("points", name) for name in MODELS),
        ("slopes", next(iter(MODELS))),
    ]
    for stage, model in stages:
        until = ["--deadline", str(time.time() + 300)]
        of = ["--model", model] if model else []
        named = ["--models", *MODELS]
        measure.main([str(raw), *BUDGETS.split(), *named, "--stage", stage, *of, *until])
        faulthandler.cancel_dump_traceback_later()
        if stage == "profile":  # A point that hung before is not begun again.
            failed = [{"model": "tiny", "point": "decode-1-0"}]
            text = json.dumps({"points": [], "failed": failed})
            (raw / "measured.json").write_text(text, encoding="utf-8")
    keep(raw, folder)
    kept = Kept(folder)
    kept.write(predict(kept))


def main() -> None:
    p = of_this_script(__doc__)
    p.add_argument("raw", type=Path)
    p.add_argument("results", type=Path)
    args = p.parse_args()
    stand_in(args.raw, args.results)


if __name__ == "__main__":
    leaving(main)
