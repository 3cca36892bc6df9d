"""bf16 against float32 at true width: moegen's error beside transformers' own.

Four Mixtral-8x7B layers with random weights, saved once as bf16. The float32 reference is
transformers on the same weights; both bf16 runs are teacher-forced on its greedy tokens.
Twice: with a random router, whose near ties flip in any bf16 run, and with one that tokens
decide clearly, where the arithmetic alone is compared.

    python benchmarks/h200/bf16_error.py OUT.json [--layers 4] [--tokens 32]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import MixtralConfig, MixtralForCausalLM

import moegen as mg

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from tiny import distinct_features, steer

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
    result: dict[str, Any] = {
        "layers": args.layers,
        "tokens": args.tokens,
        "prompts": PROMPT_LENGTHS,
    }
    for router in ("clear", "random"):
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            with torch.device(args.device):
                model = MixtralForCausalLM._from_config(
                    MixtralConfig(**config), dtype=torch.bfloat16
                )
            if router == "clear":
                steer(model, distinct_features(spec.vocab).to(args.device, torch.bfloat16))
            model.save_pretrained(folder)
            del model
            result[router] = compare(Path(folder), spec.vocab, args.tokens, args.device)
            print(router, json.dumps(result[router], indent=1), flush=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def compare(folder: Path, vocab: int, tokens: int, device: str) -> dict[str, Any]:
    """Errors of transformers' and moegen's bf16 logits, over all prompts and tokens."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, vocab, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]

    def loaded(dtype: torch.dtype) -> MixtralForCausalLM:
        # Loaded, not cast: casting would round the rotary frequencies as well.
        return MixtralForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()

    def greedy(model: MixtralForCausalLM, prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt], device=device)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return out[0, len(prompt) :].tolist()

    @torch.inference_mode()
    def forced(model: MixtralForCausalLM) -> torch.Tensor:
        rows = []
        for prompt, answer in zip(prompts, answers, strict=True):
            ids = torch.tensor([prompt + answer[:-1]], device=device)
            rows.append(model(ids, use_cache=False).logits[0, len(prompt) - 1 :].float().cpu())
        return torch.cat(rows)

    exact = loaded(torch.float32)
    answers = [greedy(exact, p) for p in prompts]
    reference = forced(exact)
    del exact
    theirs = forced(loaded(torch.bfloat16))
    best = reference.topk(2, dim=-1).values
    sure = best[:, 0] - best[:, 1] > 4 * (theirs - reference).abs().max()
    result: dict[str, Any] = {
        "rows": len(reference),
        "rows_with_margin_above_4x_error": int(sure.sum()),
        "transformers": errors(theirs, reference),
        "runs": [],
    }
    for omega in (0.0, 0.5, 1.0):
        s = mg.Strategy(B=len(prompts), b_a=2, b_e=256, omega=omega)
        with mg.Engine.from_pretrained(folder, s, device=device, dtype="bfloat16") as engine:
            outs = engine.generate(
                prompts, tokens, forced=answers, return_logits=True, ignore_eos=True
            )
        ours = torch.cat([o.logits for o in outs if o.logits is not None]).float()
        run = {"omega": omega} | errors(ours, reference)
        for name in ("max_abs", "rms"):
            run[f"{name}_ratio"] = run[name] / result["transformers"][name]
        same = ours.argmax(-1) == reference.argmax(-1)
        run["same_argmax_where_sure"] = bool(same[sure].all())
        result["runs"].append(run)
    return result


def errors(got: torch.Tensor, wanted: torch.Tensor) -> dict[str, Any]:
    """Largest and root-mean-square error over all logits, and rows with the same argmax."""
    e = (got - wanted).double()
    same = got.argmax(-1) == wanted.argmax(-1)
    return {
        "max_abs": e.abs().max().item(),
        "rms": e.pow(2).mean().sqrt().item(),
        "same_argmax": int(same.sum()),
    }


if __name__ == "__main__":
    main()
