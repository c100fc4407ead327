"""Fuzzing with hostile inputs: each must be accepted, or refused with one sentence; everything else is a fault.

python -m tests.robustness.fuzz --inputs 10000 --seeds 5
python -m tests.robustness.fuzz --family commands --seed 3 --number 17      one input again, with its traceback
"""
