"""Running a task graph for real: lanes, kernels, weights, the KV store and the token loop.

Needs the extra ``run`` (torch, transformers, safetensors); never imports :mod:`moegen.sim`.
"""
