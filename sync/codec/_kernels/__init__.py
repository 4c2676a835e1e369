"""The compiled kernels' C sources, and `native`, the extension that the package's build makes of them."""
