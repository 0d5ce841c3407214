"""The one causal engine: how a sequence is cut, the loop, sums of states."""
