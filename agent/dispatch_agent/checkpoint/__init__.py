"""The local disk: what executions write under `exec/<attempt>/`, and when it is complete.

Owns the watchdog import and `.dispatch/`. Must not know what a store, a commit record or a fence is.
"""
