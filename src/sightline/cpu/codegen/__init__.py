"""Generation of LLVM: a small vector language, its elementary functions, and the rendering of formulas."""
