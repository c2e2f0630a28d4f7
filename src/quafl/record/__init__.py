"""Rows on disk, the analysis's quantities, plots and reports. Reads what was recorded; never trains."""
