"""Low-dimensional columns: from Parquet into mapped arrays, and their statistics."""
