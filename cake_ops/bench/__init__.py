"""Benchmarks of the operators: ``python -m cake_ops.bench --help``.

shapes    the rows: problems, operations, arithmetic
arms      what each library is asked to do
accuracy  the FP64 check before anything is timed
timing    paired groups and GPU intervals; devices has the profiler, the cold L2 and the clock
records   statistics and the JSON file; report renders tables and a picture from it
grouped   the command that puts these together; host measures the host side
"""
