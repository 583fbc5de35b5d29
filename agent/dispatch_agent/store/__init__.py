"""The destination: keys and bytes, conditional writes, and what a store can prove.

Owns every fsspec and s3fs import. Must not know what a save, an epoch or a commit record is.
"""
