"""The causal engine: cutting a sequence, the loop over it, and sums of states."""
