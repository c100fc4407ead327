"""A campaign of hostile inputs: each is taken, or refused by one sentence; whatever else happens is a fault.

python -m tests.robustness.fuzz --inputs 10000 --seeds 5
python -m tests.robustness.fuzz --family commands --seed 3 --number 17      one input again, with its traceback
"""
