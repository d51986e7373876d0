"""Files that others made: which of a directory's files are data, and what they contain whatever their names say.

Imports `base`. `finding` lists files, `contents` decodes them, `tables` reads CSV and Parquet.
"""
