"""Arrays of any library: their operations, their memory layouts, and the kinds that are refused."""
