"""Sightline for Equinox: multi-head attention as a module.

The import raises MissingExtraError if Equinox is not installed.
"""

from __future__ import annotations

from typing import Any

from .errors import MissingExtraError, ParameterError, ShapeError

try:
    import equinox
except ImportError as error:
    raise MissingExtraError(
        "sightline.equinox without Equinox", "Equinox 0.13 or later", 'pip install "sightline-attention[equinox]"'
    ) from error

import jax
import jax.numpy as jnp

from .jax.functional import attend_by_position

__all__ = ["MultiheadAttention"]


class MultiheadAttention(equinox.nn.MultiheadAttention):  # type: ignore[misc]
    """`equinox.nn.MultiheadAttention` whose attention is computed by Sightline.

        Σ over heads h of softmax(Q_h K_hᵀ / √d_qk) V_h W_hᴼ    with Q_h = query W_hᵠ, K_h = key_ W_hᴷ, V_h = value W_hⱽ

    The arguments of the constructor, the parameters and their order are those of Equinox's layer. Copy the parameters
    of an Equinox layer with `jax.tree.unflatten(jax.tree.structure(ours), jax.tree.leaves(theirs))`.

    Call
    ----
    query : (T, query_size), key_ : (S, key_size), value : (S, value_size) real numbers
    mask : (T, S) or (heads, T, S) bool, or formula of h, i and j, optional
        True lets a query attend to a key. The output of a query that attends to no key is the output projection's bias.
    key : key of jax.random, required if weights are dropped
    inference : bool, optional
        True drops no weights. The default is `self.dropout.inference`.
    deterministic : bool, optional
        The former name of `inference`. If both are given, `deterministic` counts.
    process_heads : function, optional
        It maps Q (T, heads, d_qk), K (S, heads, d_qk) and V (S, heads, d_vo) to three arrays of the same shapes.

    Returns (T, output_size).

    Raises
    ------
    ParameterError
        Weights are dropped and there is no `key`.
    ShapeError
        The shapes do not fit the ones above.
    SightlineError
        The other errors of `sightline.jax.dot_product_attention`.

    References
    ----------
    Vaswani et al., "Attention Is All You Need", 2017, section 3.2.2.

    Examples
    --------
    >>> from sightline import i, j
    >>> from sightline.equinox import MultiheadAttention
    >>> layer = MultiheadAttention(num_heads=2, query_size=8, key=jax.random.key(0))
    >>> x = jnp.ones((4, 5, 8))
    >>> jax.vmap(lambda x: layer(x, x, x, mask=i >= j))(x).shape
    (4, 5, 8)
    """

    def __call__(
        self,
        query: Any,
        key_: Any,
        value: Any,
        mask: Any = None,
        *,
        key: Any = None,
        inference: bool | None = None,
        deterministic: bool | None = None,
        process_heads: Any = None,
    ) -> Any:
        """Return the output (T, output_size)."""
        if deterministic is not None:
            inference = deterministic
        if any(x.ndim != 2 for x in (query, key_, value)):
            given = ", ".join(str(x.shape) for x in (query, key_, value))
            raise ShapeError(f"query, key and value of shapes {given}", "(positions, width)", "jax.vmap for a batch")
        heads = self._project_heads(query, key_, value)
        if process_heads is not None:
            shapes = [x.shape for x in heads]
            heads = process_heads(*heads)
            if [x.shape for x in heads] != shapes:
                raise ShapeError(
                    f"process_heads returned the shapes {[x.shape for x in heads]}", f"{shapes}", "keep the shapes"
                )
        output, _ = attend_by_position(heads, None, [mask], **self._dropout_options(key, inference))
        return jax.vmap(self.output_proj)(output.reshape(len(query), -1))

    def _project_heads(self, *inputs: Any) -> list[Any]:
        """Return query, key and value as arrays (positions, heads, width)."""
        projections = self.query_proj, self.key_proj, self.value_proj
        return [
            jax.vmap(projection)(x).reshape(len(x), self.num_heads, -1)
            for projection, x in zip(projections, inputs, strict=True)
        ]

    def _dropout_options(self, key: Any, inference: bool | None) -> dict[str, Any]:
        rate = self.dropout.p
        if (self.dropout.inference if inference is None else inference) or not rate:
            return {}
        if key is None:
            raise ParameterError(f"dropout_p={rate} and no key", "key=jax.random.key(0)", "inference=True drops none")
        return {"dropout": rate, "seed": jax.random.bits(key, (), jnp.uint32)}
