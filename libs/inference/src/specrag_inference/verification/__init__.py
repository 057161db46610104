"""Lossless verification of token trees: the output law is exactly the target's."""

from specrag_inference.verification.laws import TargetLaws
from specrag_inference.verification.walk import WalkResult, walk_tree

__all__ = ["TargetLaws", "WalkResult", "walk_tree"]
