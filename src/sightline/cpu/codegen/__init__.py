"""Generation of LLVM code: a small vector language, its elementary functions, and the rendering of formulas."""
