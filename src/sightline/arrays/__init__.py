"""Arrays of any library, their memory layouts, the kinds that are refused, and what caches have in common."""
