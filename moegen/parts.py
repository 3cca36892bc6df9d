"""The parts of `moegen.sim.bounds.Bound` in the words of someone who has not read the design."""

from __future__ import annotations

from typing import NamedTuple


class Part(NamedTuple):
    """A part in a word or two, where there is little room, and in a phrase."""

    short: str
    phrase: str


PARTS = {
    "lane BULK": Part("link (weights)", "the copies of weights to the GPU"),
    "lane KV": Part("link (KV)", "the copies of KV between host and GPU"),
    "lane ACT": Part("small transfers", "the small copies between CPU and GPU"),
    "lane GPU": Part("GPU", "the GPU"),
    "lane CPU": Part("CPU attention", "the attention on the CPU"),
    "resource h2d": Part("link (weights and KV)", "the link to the GPU, weights and KV together"),
    "resource d2h": Part("link, from the GPU", "the link from the GPU"),
    "resource zero_copy": Part("zero-copy kernels", "the kernels that copy over the link"),
    "resource host_memory": Part("host memory", "the bandwidth of host memory"),
    "resource gpu": Part("GPU", "the GPU"),
    "resource cpu": Part("CPU attention", "the CPU"),
    "chain": Part("chain of one layer", "the tasks that wait for one another, layer after layer"),
}
