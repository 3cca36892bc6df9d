"""The host weight store: every layer's dense blob and experts as flat byte buffers.

One blob is one bulk copy to the GPU, and a GPU slot is viewed by the same layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from moegen.errors import InvalidInput
from moegen.exec.checkpoint import Checkpoint
from moegen.exec.families.base import Family, Piece
from moegen.exec.layout import Layout
from moegen.exec.pinning import Pins, host_buffer
from moegen.graph.detect import cores
from moegen.graph.model import ModelSpec
from moegen.units import format_bytes

Progress = Callable[[int, int], None]

_MAX_THREADS = 16
_TIED_ROWS = 1024


class HostWeights:
    """All weights of a model in host memory. Make one with :meth:`load` or :meth:`random`.

    Attributes
    ----------
    dense : list of Tensor, uint8 [nbytes]
        Everything of a layer but its routed experts.
    experts : list of (Tensor, uint8 [E, expert_nbytes], or None)
        None for a layer without experts.
    head : Tensor, uint8 [nbytes]
        Embedding, final norm, output matrix unless tied.
    dense_layouts, expert_layouts, head_layout
        How to view them; equal layers share one Layout.
    pinned : bool
        Whether the GPU can copy from all of it without a detour.
    notes : list of str
        What a person should know and no error says: tensors left out, why pinning failed.
    """

    def __init__(self, spec: ModelSpec, family: Family, *, pin: bool = False) -> None:
        self.spec, self.family = spec, family
        self.notes: list[str] = []
        made: dict[tuple[str, str], Layout] = {}

        def layout(kind: str, index: int) -> Layout:
            key = (kind, spec.layers[index].name)
            if key not in made:
                shapes = getattr(family, f"{kind}_layout")(index)
                made[key] = Layout.of(shapes, family.dtype_of)
            return made[key]

        self.dense_layouts = [layout("dense", i) for i in range(spec.n_layers)]
        self.expert_layouts = [
            layout("expert", i) if layer.mlp == "moe" else None
            for i, layer in enumerate(spec.layers)
        ]
        self.head_layout = Layout.of(family.head_layout(), family.dtype_of)
        self.dense = [host_buffer(lay.nbytes, huge=pin) for lay in self.dense_layouts]
        self.experts = [
            None
            if lay is None
            else host_buffer(layer.n_experts * lay.nbytes, huge=pin).view(
                layer.n_experts, lay.nbytes
            )
            for layer, lay in zip(spec.layers, self.expert_layouts, strict=True)
        ]
        self.head = host_buffer(self.head_layout.nbytes, huge=pin)
        self._pins = Pins()

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(t.nbytes for t in self._buffers())

    @property
    def pinned(self) -> bool:
        """Whether every buffer is registered with the CUDA driver."""
        return self._pins.complete

    def dense_views(self, layer: int) -> dict[str, Tensor]:
        """The dense blob of a layer as named tensors."""
        return self.dense_layouts[layer].view(self.dense[layer])

    def expert_views(self, layer: int, expert: int) -> dict[str, Tensor]:
        """One expert as named tensors."""
        blobs, layout = self.experts[layer], self.expert_layouts[layer]
        if blobs is None or layout is None:
            raise InvalidInput(f"layer {layer} of {self.spec.name} has no routed experts")
        return layout.view(blobs[expert])

    def head_views(self) -> dict[str, Tensor]:
        """Embedding, final norm and output matrix as named tensors."""
        return self.head_layout.view(self.head)

    @classmethod
    def load(
        cls,
        path: str | Path,
        spec: ModelSpec,
        family: Family,
        *,
        pin: bool = False,
        progress: Progress | None = None,
        threads: int | None = None,
    ) -> Self:
        """Read a checkpoint, each tensor straight to its place, converted on the way.

        Parameters
        ----------
        path : str or Path
            A folder with ``model.safetensors``, or shards and their index.
        pin : bool
            Register the memory with the CUDA driver afterwards.
        progress : callable, optional
            Called with bytes written so far and bytes in all.
        threads : int, optional
            Tensors read at a time.

        Raises
        ------
        InvalidInput
            If the folder, a shard or a tensor is missing, cut short or of another shape.
        """
        checkpoint = Checkpoint(path)
        require_tensors(checkpoint, spec, family)
        store = cls(spec, family, pin=pin)
        todo = store._plan(checkpoint)
        tied = {"lm_head.weight"} if spec.tie_embeddings else set()
        unused = checkpoint.tensors.keys() - {p.key for p, _ in todo} - tied
        if unused:
            store.notes.append(
                f"{len(unused)} tensor(s) of {checkpoint.path} are not used, such as {min(unused)}"
            )

        def read(job: tuple[Piece, Tensor]) -> int:
            piece, target = job
            checkpoint.read(piece.key, target, (piece.index or 0) * math.prod(piece.shape[1:]))
            return target.nbytes

        done, total = 0, sum(target.nbytes for _, target in todo)
        with ThreadPoolExecutor(threads or _threads()) as pool:
            try:
                for nbytes in pool.map(read, todo):
                    done += nbytes
                    if progress is not None:
                        progress(done, total)
            except BaseException:
                pool.shutdown(cancel_futures=True)  # the rest is of no use
                raise
        for key in tied & checkpoint.tensors.keys():
            store._compare_tied(checkpoint, key)
        if pin:
            store.pin()
        return store

    @classmethod
    def random(cls, spec: ModelSpec, family: Family, *, seed: int = 0, pin: bool = False) -> Self:
        """Weights of the right shapes for measuring speed; experts differ from one another.

        Norms are 1, biases 0. Matrices have a standard deviation of fan_in ** -0.5, so
        activations keep their scale. They repeat one random block from different places,
        which fills memory as fast as it can be written.
        """
        store = cls(spec, family, pin=pin)
        generator = torch.Generator().manual_seed(seed)
        # Of a prime length: the rows of a matrix do not line up with it, so none are equal.
        block = torch.randn(_BLOCK, generator=generator)
        jobs = list(store.head_views().items())
        for i, layer in enumerate(spec.layers):
            jobs += store.dense_views(i).items()
            for e in range(layer.n_experts):
                jobs += store.expert_views(i, e).items()
        shifts = torch.randint(_BLOCK, (len(jobs),), generator=generator).tolist()
        scaled: dict[tuple[int, torch.dtype], Tensor] = {}
        for _, t in jobs:
            if t.dim() > 1 and (t.shape[-1], t.dtype) not in scaled:
                fan_in = t.shape[-1]
                scaled[fan_in, t.dtype] = (block * fan_in**-0.5).to(t.dtype)
        with ThreadPoolExecutor(_threads()) as pool:
            fills = [
                pool.submit(_fill, name, t, shift, scaled)
                for (name, t), shift in zip(jobs, shifts, strict=True)
            ]
            for fill in fills:
                fill.result()
        if pin:
            store.pin()
        return store

    def pin(self) -> None:
        """Register all buffers with the CUDA driver; a failure becomes a note, not an error."""
        reason = self._pins.register(self._buffers())
        if reason is not None:
            self.notes.append(f"weights are not pinned, copies to the GPU will be slow: {reason}")

    def close(self) -> None:
        """Undo :meth:`pin`. Needed before the memory is freed; no copy may be under way."""
        self._pins.unregister()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        kind = "pinned" if self.pinned else "pageable"
        return f"<HostWeights {self.spec.name}: {format_bytes(self.nbytes)}, {kind}>"

    def _buffers(self) -> list[Tensor]:
        return [self.head, *self.dense, *(t for t in self.experts if t is not None)]

    def _compare_tied(self, checkpoint: Checkpoint, key: str) -> None:
        """Note an output matrix that the configuration says is the embedding and is not."""
        embed, stored = self.head_views()["embed"], checkpoint.tensors[key]
        same = stored.shape == tuple(embed.shape)
        if same:  # some rows say enough, and all of them would take long to read
            rows = embed[:_TIED_ROWS]
            other = torch.empty_like(rows)
            checkpoint.require(key, stored.shape)
            checkpoint.read(key, other)
            same = torch.equal(other, rows)
        if not same:
            self.notes.append(
                f"{stored.file} has a {key} that differs from the embedding, and the "
                f"configuration ties the two (tie_word_embeddings): the embedding is used"
            )

    def _plan(self, checkpoint: Checkpoint) -> list[tuple[Piece, Tensor]]:
        """Every piece that is needed and the place that it fills, file by file."""
        tensors, family = checkpoint.tensors, self.family
        todo: list[tuple[Piece, Tensor]] = []

        def add(pieces: list[Piece], views: dict[str, Tensor]) -> None:
            for p in pieces:
                rows = p.shape[0] if p.index is None else p.shape[1]
                todo.append((p, views[p.target][p.row : p.row + rows]))

        keys = tensors.keys()
        add(family.head_sources(), self.head_views())
        for i, layer in enumerate(self.spec.layers):
            add(family.dense_sources(i, keys), self.dense_views(i))
            for e in range(layer.n_experts):
                add(family.expert_sources(i, e, keys), self.expert_views(i, e))

        def place(job: tuple[Piece, Tensor]) -> tuple[Path, int, int]:
            stored = tensors[job[0].key]
            return stored.file, stored.offset, job[0].index or 0

        return sorted(todo, key=place)


def require_tensors(checkpoint: Checkpoint, spec: ModelSpec, family: Family) -> None:
    """Refuse a checkpoint that lacks a tensor, or has one of another shape or quantised.

    Raises
    ------
    InvalidInput
    """
    keys = checkpoint.tensors.keys()

    def require(pieces: list[Piece]) -> None:
        for p in pieces:
            if p.key not in keys:
                raise InvalidInput(
                    f"{checkpoint.path} has no tensor {p.key}, which {spec.model_type} needs with "
                    f"shape {list(p.shape)}"
                )
            checkpoint.require(p.key, tuple(p.shape))

    require(family.head_sources())
    for i, layer in enumerate(spec.layers):
        require(family.dense_sources(i, keys))
        for e in range(layer.n_experts):  # as many as the configuration says: one at a time
            require(family.expert_sources(i, e, keys))


_BLOCK = 4_194_301  # prime


def _threads() -> int:
    return min(_MAX_THREADS, cores())


def _fill(name: str, t: Tensor, shift: int, scaled: dict[tuple[int, torch.dtype], Tensor]) -> None:
    if t.dim() == 1:
        t.fill_(0.0 if name.endswith("_bias") else 1.0)
        return
    flat, block, at = t.view(-1), scaled[t.shape[-1], t.dtype], 0
    while at < len(flat):
        n = min(len(flat) - at, len(block) - shift)
        flat[at : at + n].copy_(block[shift : shift + n])
        at, shift = at + n, 0
