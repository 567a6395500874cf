"""Generate Triton functions from the mask and score formulas."""
