"""transformers + accelerate ``cpu_offload`` on the same machine, widths and cap of GPU memory.

The model is built with random weights in host memory. With its parameters registered as pinned, the
largest batch is looked for that plain ``generate()`` (one-shot prefill, default cache) completes
under the cap, at the prompt's length and at the answer's end; its prefill and decode steps are
timed; then decode steps once more as ``cpu_offload`` comes, from pageable memory.

    python benchmarks/h200/peers.py OUT.json [--layers 32]
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import accelerate
import torch
import transformers
from harness import Results, cap_gpu, model_of, parser, say
from meters import GpuPeak, settle
from torch import nn
from transformers import DynamicCache, MixtralConfig, MixtralForCausalLM

from moegen.exec.pinning import Pins, host_buffer
from moegen.units import format_bytes

PIECE = 32 * 2**20  # elements that a thread fills at once


def main(argv: list[str] | None = None) -> None:
    p = parser(__doc__, budget_s=400)
    p.set_defaults(layers=32)
    p.add_argument("--prompt-len", type=int, default=512)
    p.add_argument("--gen-len", type=int, default=256)
    p.add_argument("--first-batch", type=int, default=88, help="the batch to try first")
    p.add_argument("--most-batch", type=int, default=1024, help="look no further than that")
    p.add_argument("--precision", type=float, default=0.04, help="of the largest batch")
    p.add_argument("--pinned-steps", type=int, default=4)
    p.add_argument("--pageable-steps", type=int, default=2)
    p.add_argument("--search-s", type=float, default=75, help="look for the batch so long at most")
    args = p.parse_args(argv)
    torch.set_grad_enabled(False)
    spec, _ = model_of(args)
    out = Results(args, model=spec.name, layers=args.layers, gpu_memory_bytes=args.gpu_memory)
    out.put(
        prompt_len=args.prompt_len,
        gen_len=args.gen_len,
        transformers=transformers.__version__,
        accelerate=accelerate.__version__,
    )
    cap_gpu(args)
    gpu, pins = GpuPeak(args.device), Pins()
    t = time.perf_counter()
    model = random_model(spec.hf, args.layers)
    parameters = [p.data for p in model.parameters()]
    nbytes = sum(p.nbytes for p in parameters)
    out.put(
        weights_bytes=nbytes,
        build_s=time.perf_counter() - t,
        attention=model.config._attn_implementation,
        experts=getattr(model.config, "_experts_implementation", None),
    )
    say(f"built {format_bytes(nbytes)} in {out.data['build_s']:.1f} s")
    cuda = args.device == "cuda"
    if cuda:
        t = time.perf_counter()
        problem = pins.register(parameters)
        out.put(register_s=time.perf_counter() - t, pinning_problem=problem)
        say(f"registered in {out.data['register_s']:.1f} s: {problem or 'pinned'}")
    accelerate.cpu_offload(model, execution_device=torch.device("cuda:0" if cuda else "cpu"))

    tried: dict[int, dict[str, Any]] = {}

    def completes(B: int) -> bool:
        """Whether generate() at the prompt's length, and a step at the answer's end, fit."""
        gpu.reset()
        prefill_s = attempt(lambda: generate(model, B, args, new=2))
        prompt_peak = gpu.bytes()
        end_s = None
        if prefill_s is not None:
            gpu.reset()
            last = args.prompt_len + args.gen_len - 1
            end_s = attempt(lambda: Decode(model, B, last, args.device).step())
        tried[B] = {"B": B, "prompt_s": prefill_s, "prompt_peak_bytes": prompt_peak}
        tried[B] |= {"end_s": end_s, "end_peak_bytes": gpu.bytes()}
        out.add(tried[B], to="tried")
        say(f"batch {B}: {'completes' if end_s is not None else 'out of memory'} {tried[B]}")
        return end_s is not None

    B = largest(completes, args, out)
    out.put(largest_batch=B)
    if not B:
        out.put(failed=["no batch completes"])
    else:
        # From 512 prompt tokens to one new token: generate()'s prefill at that batch.
        seconds = attempt(lambda: generate(model, B, args, new=1))
        out.put(prefill_s=seconds)
        middle = args.prompt_len + args.gen_len // 2
        out.put(pinned=decode(model, B, middle, args.pinned_steps, args.device, out))
        pins.unregister()
        if out.left_s > 30 or args.device == "cpu":
            out.put(pageable=decode(model, B, middle, args.pageable_steps, args.device, out))
        else:
            out.data["left_out"] = ["pageable"]
    out.done()


def random_model(hf: Any, layers: int) -> MixtralForCausalLM:
    """A Mixtral of bf16 in ordinary host memory, each parameter on pages of its own."""
    config = {k: v for k, v in hf.items() if k not in ("torch_dtype", "dtype", "architectures")}
    config = MixtralConfig(**(config | {"num_hidden_layers": layers}))
    with torch.device("meta"):
        model = MixtralForCausalLM._from_config(config, dtype=torch.bfloat16)
    jobs: list[tuple[torch.Tensor, float]] = []
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            data = host_buffer(p.numel() * 2, huge=True).view(torch.bfloat16).view(p.shape)
            setattr(module, name, nn.Parameter(data, requires_grad=False))
            std = p.shape[-1] ** -0.5 if p.dim() > 1 else 0.0
            jobs += [(piece, std) for piece in data.view(-1).split(PIECE)]
    model.tie_weights()
    # The only buffers, rotary frequencies, are computed when this is made.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
    noise = torch.randn(1_000_003, generator=torch.Generator().manual_seed(0))

    def fill(job: tuple[torch.Tensor, float]) -> None:
        piece, std = job
        if not std:
            piece.fill_(1)
            return
        block = (noise * std).bfloat16()
        for at in range(0, len(piece), len(block)):
            piece[at : at + len(block)] = block[: len(piece) - at]

    with ThreadPoolExecutor(16, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        list(pool.map(fill, jobs))
    return model.eval()


def generate(model: MixtralForCausalLM, B: int, args: Any, new: int) -> None:
    """Plain ``generate()`` of ``new`` tokens for ``B`` prompts."""
    ids = torch.randint(3, model.config.vocab_size, (B, args.prompt_len)).to(args.device)
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )


class Decode:
    """Greedy steps of a batch whose cache holds ``past`` tokens of noise already."""

    def __init__(self, model: MixtralForCausalLM, B: int, past: int, device: str) -> None:
        self.model, self.device = model, device
        self.cache = DynamicCache()
        c = model.config
        heads, dim = c.num_key_value_heads, getattr(c, "head_dim", None)
        shape = (B, heads, past, dim or c.hidden_size // c.num_attention_heads)
        for layer in range(c.num_hidden_layers):
            k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
            self.cache.update(k, v, layer)
            del k, v
        self.ids = torch.randint(3, c.vocab_size, (B, 1)).to(device)

    def step(self) -> None:
        out = self.model(
            input_ids=self.ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1
        )
        self.ids = out.logits[:, -1:].argmax(-1)
        settle(self.device)


def decode(
    model: MixtralForCausalLM, B: int, past: int, steps: int, device: str, out: Results
) -> dict[str, Any]:
    """Time decode steps at a cache of ``past`` tokens, after one that does not count."""
    state, spans = Decode(model, B, past, device), []
    for i in range(steps + 1):
        if spans and out.left_s < 1.5 * spans[-1]:
            break
        t = time.perf_counter()
        state.step()
        spans.append(time.perf_counter() - t)
        say(f"decode step {i}: {spans[-1]:.2f} s")
    counted = spans[1:] or spans
    step_s = statistics.median(counted)
    return {
        "B": B,
        "context": past,
        "steps_s": counted,
        "step_s": step_s,
        "tokens_per_s": B / step_s,
    }


def attempt(work: Callable[[], object]) -> float | None:
    """Seconds that ``work`` took, or None if the GPU's memory was not enough."""
    t = time.perf_counter()
    try:
        work()
    except torch.OutOfMemoryError:
        return None
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return time.perf_counter() - t


def largest(completes: Callable[[int], bool], args: Any, out: Results) -> int:
    """The largest batch that completes, within ``--precision``; 0 if none does."""
    deadline = time.perf_counter() + min(args.search_s, out.left_s)
    good, bad, B = 0, args.most_batch + 1, min(args.first_batch, args.most_batch)
    while bad - good > max(1, args.precision * good) and time.perf_counter() < deadline:
        if completes(B):
            good = B
        else:
            bad = B
        if bad > args.most_batch:
            B = min(args.most_batch, good * 5 // 4 + 1)
            if good == args.most_batch:
                break
        elif good == 0:
            B = max(1, bad * 3 // 5)
            if bad == 1:
                break
        else:
            B = (good + bad) // 2
    out.put(smallest_that_fails=bad if bad <= args.most_batch else None)
    return good


if __name__ == "__main__":
    main()
