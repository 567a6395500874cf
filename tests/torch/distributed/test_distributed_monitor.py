"""The monitor of attention on ranks: each rank gets the numbers over all of them."""

import numpy as np

from monitored_models import CausalModel, define, make_batch, record_ranks


def test_numbers_are_over_all_ranks_or_those_of_each(ranks):
    found = ranks.run(record_ranks)
    batches = [make_batch(rank, 1 + rank) for rank in range(ranks.size)]
    model = CausalModel()
    for rank, both in enumerate(found):
        for numbers, expected in zip(both, (batches, [batches[rank]]), strict=True):
            for layer, rows in define(model, expected).items():
                np.testing.assert_allclose(np.stack(numbers[layer][:3]), rows, rtol=1e-12)
                np.testing.assert_array_equal(numbers[layer][3], 6 * sum(map(len, expected)))
