"""The benchmarks: Polar against its peers, in one run on this machine.

    python -m benchmarks NAME [options]      make bench-NAME BENCH="options"

Each benchmark is a package, or a module, with a `run` that measures, a `show` that prints and a `command`; what several
share lies beside them. They import anything of Polar's but its command line, and nothing in Polar imports them.
"""
