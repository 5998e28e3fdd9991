"""CUDA backend."""
