"""How the container image is built and tested: `python -m image`, which `make image` and `make image-test` run."""
