"""Fused passes for a GPU, each beside a slow twin in plain torch that the tests hold it against."""
