"""The archive: groups that were trained or dropped, as Parquet files. Needs `rollq[archive]`."""
