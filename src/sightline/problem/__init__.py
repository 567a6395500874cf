"""The checked arguments of one call (`Problem`), the base class of kernels, and the choice of a kernel."""
