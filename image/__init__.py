"""Test support for the container image: `make image` builds it, and `make image-test` tests it in real containers."""
