"""The definition of attention, kernels in plain array operations, dropout, and the budget of rounding errors."""
