"""One command for a machine with a GPU: tests, tables beside other kernels, and a page of both.

`python -m benchmarks.gpu` needs nothing but the machine's torch and triton and a folder of wheels.
"""
