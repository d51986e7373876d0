"""What `scripts/bench.py` measures: a module for each name, with `add_options`, and `measure`, which yields rows."""
