"""bf16 against float32 at true width: moegen's error beside transformers' own.

Four Mixtral-8x7B layers with random weights, saved once as bf16. The float32 reference is
transformers on the same weights; both bf16 runs are teacher-forced on its greedy tokens.

    python benchmarks/h200/bf16_error.py OUT.json [--layers 4] [--tokens 32]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from transformers import MixtralConfig, MixtralForCausalLM

import moegen as mg

PROMPT_LENGTHS = (1, 5, 33, 64, 200, 511)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--hidden", type=int, help="another width, to try the script out")
    args = parser.parse_args()
    spec = mg.ModelSpec.from_pretrained("mixtral-8x7b").with_(n_layers=args.layers)
    config = {k: v for k, v in spec.hf.items() if k not in ("torch_dtype", "dtype")}
    if args.hidden:
        config |= {"hidden_size": args.hidden, "intermediate_size": 2 * args.hidden}
    torch.manual_seed(0)
    with torch.device(args.device):
        model = MixtralForCausalLM._from_config(MixtralConfig(**config), dtype=torch.bfloat16)
    model.eval()
    folder = Path(tempfile.mkdtemp())
    model.save_pretrained(folder)
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(3, spec.vocab, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS
    ]

    def logits(prompt: list[int], answer: list[int]) -> torch.Tensor:
        ids = torch.tensor([prompt + answer[:-1]], device=args.device)
        with torch.inference_mode():
            return model(ids, use_cache=False).logits[0, len(prompt) - 1 :].float().cpu()

    def greedy(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt], device=args.device)
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=args.tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        return out[0, len(prompt) :].tolist()

    model.float()
    answers = [greedy(p) for p in prompts]
    reference = torch.cat([logits(p, a) for p, a in zip(prompts, answers, strict=True)])
    model.bfloat16()
    theirs = torch.cat([logits(p, a) for p, a in zip(prompts, answers, strict=True)])
    del model

    result = {"layers": args.layers, "tokens": args.tokens, "prompts": PROMPT_LENGTHS, "runs": []}
    margin = reference.topk(2, dim=-1).values.diff(dim=-1).abs()[:, 0]
    limit = (theirs - reference).abs().max().item()
    sure = margin > 4 * limit
    result["transformers"] = errors(theirs, reference)
    result["margin_exceeds_4x_error"] = int(sure.sum())
    for omega in (0.0, 0.5, 1.0):
        s = mg.Strategy(B=len(prompts), b_a=2, b_e=256, omega=omega)
        with mg.Engine.from_pretrained(folder, s, device=args.device, dtype="bfloat16") as engine:
            outs = engine.generate(
                prompts, args.tokens, forced=answers, return_logits=True, ignore_eos=True
            )
        kept = [o.logits for o in outs if o.logits is not None]
        ours = torch.cat(kept).float()
        run = {"omega": omega} | errors(ours, reference)
        run["max_ratio"] = run["max_abs"] / result["transformers"]["max_abs"]
        run["rms_ratio"] = run["rms"] / result["transformers"]["rms"]
        same = ours.argmax(-1) == reference.argmax(-1)
        run["argmax_same_where_sure"] = bool(same[sure].all())
        run["argmax_same"] = int(same.sum())
        run["argmax_same_transformers"] = int((theirs.argmax(-1) == reference.argmax(-1)).sum())
        run["rows"] = len(same)
        result["runs"].append(run)
        print(run, flush=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def errors(got: torch.Tensor, wanted: torch.Tensor) -> dict[str, float]:
    """Largest and root-mean-square error over all logits."""
    e = (got - wanted).double()
    return {"max_abs": e.abs().max().item(), "rms": e.pow(2).mean().sqrt().item()}


if __name__ == "__main__":
    main()
