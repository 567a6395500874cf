"""Parts of a long sequence: shards among ranks, parts of a problem, and the merge of their results."""
