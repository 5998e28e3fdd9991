"""Adapters that let other software run on the operators; each is imported only by who asks for it."""
