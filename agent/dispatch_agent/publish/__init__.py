"""The protocol: complete saves become commit records in epoch order, and are read back intact.

Owns order, fencing and every key name at the destination. Must not know which kind of store that is.
"""
