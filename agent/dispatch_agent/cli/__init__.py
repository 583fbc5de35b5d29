"""The commands: the only place that prints and exits. Must not decide anything that a use case decides."""
