"""The language masks and scores are written in; see `expression` for what it is and `library` for ready names."""
