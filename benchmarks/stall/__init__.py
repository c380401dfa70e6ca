"""What a caller with the longest bodies costs other callers."""
