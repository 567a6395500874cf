"""Generate LLVM: types, values and functions of a small vector language, and what renders formulas in it."""
