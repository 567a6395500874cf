"""Labels of positions: the tokens of a text, as users give them."""

from __future__ import annotations

from typing import Any

from ..errors import ParameterError

__all__ = ["labels_by_entry"]


def labels_by_entry(labels: Any) -> list[list[str]]:
    """Return a list of labels for each batch entry. A plain list of labels is read as the labels of one entry.

    Raises
    ------
    ParameterError
        `labels` is neither a list of labels nor a list of such lists.
    """
    try:
        entries = [labels] if len(labels) and isinstance(labels[0], str) else labels
        return [list(map(str, entry)) for entry in entries]
    except TypeError as error:  # `labels` has no length, or holds numbers instead of lists
        raise ParameterError(
            f"tokens of a {type(labels).__name__}: {error}",
            "a list of strings, or such a list for each text",
            "tokens=tokenizer.convert_ids_to_tokens(numbers)",
        ) from error
