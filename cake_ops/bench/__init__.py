"""Benchmarks of the operators: ``python -m cake_ops.bench --help``.

suite     rows and arms of one command: checked, timed, recorded; command is the command line they share
timing    paired groups and GPU intervals; devices has the profiler, the cold L2 and the clock
records   statistics and the JSON file; report renders tables and a picture from it; merge joins files
host      the host side of a call; breakdown times its parts

grouped   its suite: shapes has the rows, arms what each library is asked to do, accuracy the FP64 check
router    its suite: router_cases has rows and check, router_arms the libraries, of which cublas reaches two
          through ctypes; router_experts compares the experts chosen, router_tune chooses kernels
layers    MoE layers of transformers, on operands of layer_data
"""
