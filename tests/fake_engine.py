"""An engine that answers with the prompt upside down, and a tokenizer that reads characters."""

from __future__ import annotations

from types import SimpleNamespace

import moegen as mg

CONTEXT, VOCAB = 1000, 10**6


class FakeTokenizer:
    """A character is a token; 1 begins a text."""

    chat_template = "yes"

    def __call__(self, text):
        return SimpleNamespace(input_ids=[ord(c) for c in text])

    def apply_chat_template(self, messages, *, add_generation_prompt, return_dict):
        from jinja2.exceptions import TemplateError

        assert add_generation_prompt and not return_dict
        if messages[0]["role"] == "robot":
            raise TemplateError("no robots")
        return [1, *map(ord, "".join(m["role"] + m["content"] for m in messages))]


class FakeEngine:
    """Answers with the prompt upside down; the last row ends first.

    Stands for what is prepared, too: class attributes are then what a test sets.
    """

    calls: list[dict] = []
    path, device = None, SimpleNamespace(type="cpu")
    tokenizer: FakeTokenizer | None = FakeTokenizer()
    model = mg.ModelSpec.from_config(
        mg.ModelSpec.from_pretrained("mixtral-8x7b").hf
        | {"max_position_embeddings": CONTEXT, "vocab_size": VOCAB, "num_hidden_layers": 2}
    )
    hardware = mg.HardwareSpec.from_name("c2")
    refuses: mg.Infeasible | None = None
    prepared_notes: list[str] = []
    weights = SimpleNamespace(pinned=True)
    notes: list[str] = []
    cpu_attention = "C++ abacus, 3 threads"
    timelines: list = []
    fail: BaseException | None = None
    fail_loading: BaseException | None = None
    after_rows = 0

    @classmethod
    def prepare(cls, path, **kwargs):
        cls.calls.append({"path": path, **kwargs})
        prepared = cls()
        prepared.notes = cls.prepared_notes
        return prepared

    def require_weights(self):
        self.calls.append({"weights": "fit"})

    def resolve(self, work):
        self.calls.append({"work": work})
        if self.refuses is not None:
            raise self.refuses
        s = mg.Strategy(B=work.n, b_a=2, b_e=64, s_expert=2**30)
        plan = mg.Plan(prefill=s.with_(b_a=1), decode=s)
        ledgers = {
            phase: mg.memory(self.model, self.hardware, getattr(plan, phase), work, phase=phase)
            for phase in ("prefill", "decode")
        }
        return SimpleNamespace(plan=plan, **ledgers)

    def load(self, progress):
        self.calls.append({"load": True})
        if self.fail_loading is not None:
            raise self.fail_loading
        progress(1 * 10**9, 2 * 10**9)
        progress(2 * 10**9, 2 * 10**9)
        return type(self)()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.calls.append({"closed": True})

    def memory_peak(self):
        return {"host": 3 * 2**30, "gpu": 2**30 if self.device.type == "cuda" else None}

    def generate(self, prompts, max_new_tokens, on_finish, on_step):
        self.calls.append({"prompts": prompts, "max_new_tokens": max_new_tokens})
        for i in reversed(range(len(prompts))):
            if self.fail is not None and len(prompts) - 1 - i == self.after_rows:
                raise self.fail
            text = "".join(chr(t) for t in reversed(prompts[i]))[: max_new_tokens[i]]
            on_finish(
                i,
                SimpleNamespace(
                    text=text,
                    prompt_tokens=len(prompts[i]),
                    completion_tokens=len(text),
                    finish_reason="length",
                ),
            )
            done = len(prompts) - i
            on_step(
                SimpleNamespace(
                    phase="decode",
                    rows=i + 1,
                    tokens_done=done,
                    prefill_s=1.0,
                    decode_s=2.0 * done,
                )
            )
