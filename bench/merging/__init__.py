"""What merging several drafters' proposals in one tree is worth, on a pair of real models."""
