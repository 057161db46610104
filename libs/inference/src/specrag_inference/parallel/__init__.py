"""Tensor parallelism: one replica's model split over several processes.

Rank 0 is the engine process. It spawns the others, plans every pass alone and sends them the plan;
all ranks then run the same forward pass on their share of heads and cache, and meet in the
collectives of transformers' tensor-parallel layers. Only rank 0 samples.
"""
