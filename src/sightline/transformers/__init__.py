"""Sightline for Hugging Face transformers: `attn_implementation="sightline"`, `Cache`, `masking` and more.

Importing this package registers "sightline" as a name for `attn_implementation`.
"""

from __future__ import annotations

from ..errors import MissingExtraError

try:
    import torch  # noqa: F401 - the modules below need it
    import transformers

    if tuple(map(int, transformers.__version__.split(".")[:2])) < (4, 57):
        raise ImportError(f"transformers {transformers.__version__} is older than 4.57")
except ImportError as error:
    given = f"sightline.transformers: {error}"
    raise MissingExtraError(given, "transformers 4.57 or later", 'pip install -U "transformers<6" torch') from error

from .attention_interface import register
from .compatibility import NAME
from .decoding_cache import Cache
from .model_contexts import masking, serving, unpadded
from .monitor_callback import MonitorCallback
from .presses import pressing
from .word_times import Segment, Transcript, Word, word_timestamps

__all__ = [
    "NAME",
    "Cache",
    "MonitorCallback",
    "Segment",
    "Transcript",
    "Word",
    "masking",
    "pressing",
    "register",
    "serving",
    "unpadded",
    "word_timestamps",
]

register()
