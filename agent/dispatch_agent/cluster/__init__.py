"""Kubernetes and Slurm: what a container is told of its place, and the shapes of the objects that put it there."""
