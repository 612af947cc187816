"""Trajectories as tables: finished trajectories of an experience store to a Parquet file, and back (needs pyarrow).

`schema` has the columns, `writer` and `reader` the file, `sources` and `targets` the stores, `cli` the two commands.
"""
