"""The one harness that measures flashskip and its peers: `python -m benchmarks --help`."""
