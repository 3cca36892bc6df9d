"""The demonstration: a small checkpoint that speaks English, answers, and what they took."""

from moegen.demo.checkpoint import make_checkpoint
from moegen.demo.dense import dense_model

__all__ = ["dense_model", "make_checkpoint"]
