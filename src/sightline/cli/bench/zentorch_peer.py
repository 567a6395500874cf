"""The peer zentorch, AMD's plug-in for torch: its attention operator, called directly.

zentorch needs the one version of torch that it was built for, so it is usually installed in an environment of its own.
The operator is zentorch_sdpa(query, key, value, dropout_p, is_causal, *, attn_mask, scale) → (output, lse), with a
float mask that is added to the scores. Source: amd/ZenDNN-pytorch-plugin, Sdpa_ref.cpp.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np

from .implementations import Implementation, PreparedCall, prepare_with_autograd
from .workloads import Inputs, Workload


class Zentorch(Implementation):
    """The operator zentorch_sdpa. A mask other than the causal one is added to the scores as 0 and −∞."""

    name, label, packages, pip = "zentorch", "zentorch", ("torch", "zentorch"), "zentorch"

    def refuses(self, workload: Workload) -> str | None:
        """Refuse backward passes, dropout, d_v ≠ d_k, causal masks with n ≠ m, and dtypes that go to torch's kernel."""
        if workload.passes != "forward" or workload.dropout:
            return "only inference"
        if workload.dtype not in ("float32", "bfloat16"):
            return f"{workload.dtype} is computed by torch's kernel on most processors"
        if workload.d_k != workload.d_v:
            return "needs d_v = d_k"
        return "not compared where n ≠ m" if workload.is_causal and workload.n != workload.m else None

    def prepare(self, workload: Workload, inputs: Inputs, threads: int) -> PreparedCall:
        import torch

        import_module("zentorch")  # registers the operator
        attend = torch.ops.zentorch.zentorch_sdpa
        options: dict[str, Any] = {"is_causal": True} if workload.is_causal else {}
        if workload.needs_mask_array:
            assert workload.formula is not None
            allowed = workload.formula.array(workload.n, workload.m)[None, None]
            options["attn_mask"] = torch.from_numpy(np.where(allowed, np.float32(0), np.float32(-np.inf)))

        def forward(query: Any, key: Any, value: Any, bias: Any) -> Any:
            given = options if bias is None else {"attn_mask": bias}
            return attend(query, key, value, **given)[0]

        return prepare_with_autograd(workload, inputs, forward, threads)
