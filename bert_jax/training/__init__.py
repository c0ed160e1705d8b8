"""Pretraining and fine-tuning runs.

`pretrain/` and `finetune/` turn a configuration into a plan (run_plan.py), and one training loop
(loop.py) carries out the plan. `steps/` contains the training step, `run/` the session and the logs
of a run, and `sweep/` the statistics of a sweep's trials. This package may import `artefacts` and
the packages below it. Read run_plan.py, loop.py and pretrain/train.py first.
"""
